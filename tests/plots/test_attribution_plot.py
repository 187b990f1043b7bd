"""The picture of what compact slots were made of: tokens as rows, marks beside their base rate."""

from __future__ import annotations

import pytest
import torch

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots.attribution import draw

SHARES = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.75, 0.25, 0.0]])


def test_rows_are_tokens_and_the_mark_has_its_base_rate() -> None:
    fig = draw(SHARES, ["A", ".", "b", "\n"], marked=[1, 3, 1])
    heat = fig.to_dict()["data"][0]
    assert [list(row) for row in heat["z"]] == SHARES.T.tolist()
    assert list(heat["y"]) == ["0 'A'", "◂1 '.'", "2 'b'", "◂3 '\\n'"]
    title = fig.to_dict()["layout"]["title"]["text"]
    # (0.25 + 0.75) of 2 slots, and 2 of 4 tokens.
    assert "Marked tokens feed 0.50 of the slots and are 0.50" in " ".join(title.replace("<br>", " ").split())


def test_nothing_is_said_of_marks_where_there_are_none() -> None:
    assert "Marked" not in draw(SHARES, list("abcd")).to_dict()["layout"]["title"]["text"]


def test_tokens_that_do_not_match_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(2, 4\) for 3 tokens"):
        draw(SHARES, list("abc"))
