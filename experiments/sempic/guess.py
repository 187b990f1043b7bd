"""What a reader could answer who knows of every document only what that document holds.

Where a cut separates what belongs together, several answers fit equally well. A Writer sees one document at a time, so
that it can do no better than a guess among them, unless the Reader puts the documents together while it reads the
question. A mean above the guess's would show just that.
"""

from __future__ import annotations

import re

from kvnotes_interp.tasks.documents import Question


def open_answers(question: Question) -> int | None:
    """Number of answers that the documents, each read alone, leave open; None where that is not known.

    A guess is right once in so many times, and its KL to a sure answer is at least the logarithm of it.
    """
    if question.family == "gated":
        return 2 if question.detail("apart") else 1
    if question.family == "biography":
        return 1
    if question.family != "biography_cut":
        return None
    if question.detail("subject") == "name":
        return 1
    # The first name tells the pronoun, so everyone of whom the other one is said can be left out.
    pronouns = [re.findall(r"He|She", text)[0] for text in question.documents[1::2]]
    return pronouns.count(pronouns[question.gold[-1] // 2])
