"""One command per probe. A command turns its own options into those of the Python function; the rest is shared.

@probe_command("local_patching")
def patch(draws: opt.Draws = 8) -> dict[str, Any]:
    '''Its help text.'''
    return {"draws": draws}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

from kvnotes_interp.cli import options as opt
from kvnotes_interp.cli.app import app
from kvnotes_interp.cli.printing import emit, say, stoppable
from kvnotes_interp.errors import InputError

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

OwnOptions = Callable[..., dict[str, Any]]

COMMANDS: dict[str, tuple[str, Callable[..., None]]] = {}
"""Command -> its probe, and the function behind it, whose signature holds all its options."""


def _shared(
    model: opt.ModelName = "smollm2-135m",
    task: opt.TaskName = "pronoun",
    n: opt.Count = 32,
    seed: opt.Seed = 0,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    out: opt.Out = None,
    resume: opt.Resume = False,
    as_json: opt.AsJson = False,
    split: opt.Split = None,
    task_option: opt.TaskOption = None,
    min_gap: opt.MinGap = 0.25,
    min_gap_noise: opt.MinGapNoise = 50.0,
    memory_budget: opt.Budget = None,
    quiet: opt.Quiet = False,
) -> None:
    """The options that every probe command has."""


def probe_command(probe: str, **defaults: Any) -> Callable[[OwnOptions], OwnOptions]:
    """Register a command that runs `probes.<probe>`: its own options, then the shared ones, `defaults` over theirs."""

    def register(own: OwnOptions) -> OwnOptions:
        shared = [
            p.replace(default=defaults.get(p.name, p.default), annotation=_hints(_shared)[p.name])
            for p in inspect.signature(_shared).parameters.values()
        ]
        mine = [p.replace(annotation=_hints(own)[p.name]) for p in inspect.signature(own).parameters.values()]
        names = [p.name for p in mine]

        def command(**given: Any) -> None:
            chosen = own(**{name: given.pop(name) for name in names})
            run_probe(probe, chosen, SimpleNamespace(**given))

        command.__signature__ = inspect.Signature([*shared, *mine])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*shared, *mine)}
        command.__doc__, command.__name__ = own.__doc__, own.__name__
        app.command(own.__name__)(command)
        COMMANDS[own.__name__] = (probe, command)
        return own

    return register


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)


@probe_command("local_patching")
def patch(
    parts: opt.Parts = "kv,k,v",
    views: opt.Views = "all",
    draws: opt.Draws = 8,
    map_pairs: opt.MapPairs = 8,
    operator: opt.Operator = None,
    blocks: opt.Blocks = "sentences",
    tail: opt.Tail = "last",
    path: opt.SweepPath = "auto",
    dry_run: opt.DryRun = False,
) -> dict[str, Any]:
    """Local patching: field against everything after it, by position, layer and region."""
    return {
        "parts": opt.words("--parts", parts, opt.PARTS, none=False),
        "views": opt.words("--views", views, opt.VIEWS),
        "draws": draws,
        "map_pairs": map_pairs,
        **_making(operator, blocks, tail),
        "path": opt.choice("--path", path, opt.PATHS),
        "dry_run": dry_run,
    }


@probe_command("suffix_concentration")
def suffix(
    draws: opt.Draws = 5,
    operator: opt.Operator = None,
    blocks: opt.Blocks = "sentences",
    tail: opt.Tail = "last",
    path: opt.SweepPath = "auto",
    dry_run: opt.DryRun = False,
) -> dict[str, Any]:
    """Suffix concentration: how few positions after the field carry the decision."""
    return {
        "draws": draws,
        **_making(operator, blocks, tail),
        "path": opt.choice("--path", path, opt.PATHS),
        "dry_run": dry_run,
    }


@probe_command("linear_decodability", n=48)
def linear(
    features: opt.Features = "residual",
    classifiers: opt.Classifiers = "logistic,mean_difference",
    layers: opt.Layers = "",
    folds: opt.Folds = 5,
    draws: opt.LinearDraws = 2,
    direction_pairs: opt.DirectionPairs = 12,
    operator: opt.Operator = None,
    blocks: opt.Blocks = "sentences",
    tail: opt.Tail = "last",
) -> dict[str, Any]:
    """Linear probes: where the conclusion can be read, held out by content, and whether it is used."""
    return {
        "features": opt.words("--features", features, opt.FEATURES, none=False),
        "classifiers": opt.words("--classifiers", classifiers, opt.CLASSIFIERS, none=False),
        "layers": opt.layers("--layers", layers),
        "folds": folds,
        "draws": draws,
        "direction_pairs": direction_pairs,
        **_making(operator, blocks, tail),
    }


@probe_command("circuit_ablation", n=16)
def ablate(
    analyses: opt.Analyses = "all",
    ks: opt.HeadKs = "1,3,5,8,12",
    notes: opt.Notes = 8,
    draws: opt.CircuitDraws = 5,
    ablations: opt.Ablations = "resample",
    grid_pairs: opt.GridPairs = 4,
) -> dict[str, Any]:
    """Circuit ablation: which heads write the note and which read it."""
    return {
        "analyses": opt.words("--analyses", analyses, opt.ANALYSES, none=False),
        "ks": opt.numbers("--ks", ks, int, least=1),
        "notes": notes,
        "draws": draws,
        "ablations": opt.words("--ablations", ablations, opt.ABLATIONS, none=False),
        "grid_pairs": grid_pairs,
    }


@probe_command("attention_deviation")
def deviate(
    operators: opt.Operators = "no_recompute",
    rows: opt.Rows = "terminal",
    bins: opt.Bins = 20,
) -> dict[str, Any]:
    """Attention deviation: how reused blocks are read, edge against interior. Pairs or document questions."""
    return {
        "operators": opt.operators("--operators", operators),
        "rows": opt.choice("--rows", rows, opt.ROWS),
        "bins": bins,
    }


@probe_command("splice_quality", task="biography", n=16)
def splice(
    operators: opt.SpliceOperators = "splice,epic,cacheblend,random_recompute",
    documents: opt.Documents = "1,2,4,8",
    shares: opt.SpliceShares = "0.05,0.15,0.3,0.5,0.9",
    seam_repair: opt.SeamRepair = "1,4,16",
) -> dict[str, Any]:
    """Splice: answers, distances and cost of caches composed from chunks. Document questions."""
    return {
        "operators": opt.operators("--operators", operators),
        "documents": opt.numbers("--documents", documents, int, least=1),
        "shares": opt.shares("--shares", shares),
        "seam_repair": opt.read_list("--seam-repair", seam_repair, opt.tokens, such_as="1,4,16"),
    }


@probe_command("edit_in_splice", n=16)
def keystone(ks: opt.KeystoneKs = "8,32", draws: opt.Draws = 3, seam_repair: opt.OneSeam = "0") -> dict[str, Any]:
    """Keystone: does an edit inside a spliced skill do what it does inside a recomputed one?"""
    try:
        tokens = opt.tokens(seam_repair.strip())
    except ValueError as error:
        raise InputError(f"--seam-repair {seam_repair!r} {error}: write a number of tokens, or all.") from error
    return {"ks": opt.numbers("--ks", ks, int, least=1), "draws": draws, "seam_repair": tokens}


@probe_command("edit_frontier")
def edit(
    ks: opt.Ks = "1,2,4,8,16",
    rankings: opt.Rankings = "attention,causal,kv_change,profiled,random",
    wordings: opt.Wordings = "override,bare,tagged,aggressive",
    shares: opt.Shares = "0.15,0.5",
    thought_tokens: opt.ThoughtTokens = 0,
    temperature: opt.Temperature = 0.0,
    turns: opt.Turns = 0,
) -> dict[str, Any]:
    """Edits of the cache: errata, recomputes and their bounds, with what each costs."""
    return {
        "ks": opt.numbers("--ks", ks, int, least=1),
        "rankings": opt.words("--rankings", rankings, opt.RANKINGS),
        "wordings": opt.read_list(
            "--wordings", wordings, lambda word: opt.wording("--wordings", word), such_as="override,bare"
        ),
        "shares": opt.shares("--shares", shares),
        "thought_tokens": thought_tokens,
        "temperature": temperature,
        "turns": turns,
    }


@probe_command("compaction_quality", task="biography", n=16)
def compact(
    compactors: opt.Compactors = opt.COMPACTORS,
    ratios: opt.Ratios = "2,4,8,16",
    passes: opt.Passes = "1",
    iterative: opt.Iterative = False,
    chunk: opt.Chunk = None,
    budget: opt.Slots = None,
    sliding: opt.Sliding = "keep",
    query_aware: opt.QueryAware = False,
    max_new_tokens: opt.MaxNewTokens = 8,
    timing: opt.Timing = 1,
) -> dict[str, Any]:
    """Compaction: answers from compact caches, against the full one, and what they cost. Document questions."""
    return {
        **_compacting(compactors, ratios, sliding),
        "passes": opt.numbers("--passes", passes, int, least=1),
        "iterative": iterative,
        "chunk": chunk,
        "budget": budget,
        "query_aware": query_aware,
        "max_new_tokens": max_new_tokens,
        "timing": timing,
    }


@probe_command("compaction_survival", task="gate,badge")
def survive(
    compactors: opt.Compactors = opt.COMPACTORS,
    ratios: opt.Ratios = "2,4,8,16",
    sliding: opt.Sliding = "keep",
    wording: opt.Wording = "override",
    draws: opt.LinearDraws = 2,
) -> dict[str, Any]:
    """What survives compaction: decisions, edits, notes against facts. --task may name several families."""
    return {**_compacting(compactors, ratios, sliding), "wording": opt.wording("--wording", wording), "draws": draws}


def _compacting(compactors: str, ratios: str, sliding: str) -> dict[str, Any]:
    return {
        "compactors": opt.compactors("--compactors", compactors),
        "ratios": opt.numbers("--ratios", ratios, float, above=1, such_as="2,4,8"),
        "sliding": opt.choice("--sliding", sliding, opt.SLIDING),
    }


def _making(operator: str | None, blocks: str, tail: str) -> dict[str, Any]:
    if operator is not None:
        from kvnotes_interp import operators

        operators.find(operator)
    blocks, tail = opt.choice("--blocks", blocks, opt.BLOCKS), opt.choice("--tail", tail, opt.TAILS)
    return {"operator": operator, "blocks": blocks, "tail": tail}


def run_probe(probe: str, options: dict[str, Any], given: SimpleNamespace) -> None:
    """Run `probe` with its own options, and with those that all probe commands share, by their Python names."""
    check_run(given.model, given.revision, given.out, given.resume)
    from kvnotes_interp import tasks as library

    chosen = opt.task_options(given.task_option)
    documents = (*library.documents.names(), *library.documents.names_from_files())
    asks = {"splice_quality": "splice", "compaction_quality": "compact"}.get(probe)
    if asks and given.task not in documents:
        raise InputError(f'--task "{given.task}": {asks} answers document questions; use {", ".join(documents)}.')
    if probe == "splice_quality":  # every question must hold as many documents as the largest number asked for
        chosen.setdefault("documents", max(options["documents"]))
    several = probe == "compaction_survival"
    names = opt.read_list("--task", given.task, str, such_as="gate,badge") if several else (given.task,)
    drawn = {"n": given.n, "seed": given.seed, "split": given.split, **chosen}
    items: Any = [item for name in names for item in library.load_items(name, **drawn)]
    where = {"device": given.device, "dtype": given.dtype, "revision": given.revision}
    if options.pop("dry_run", False):
        from kvnotes_interp import dryrun

        emit(dryrun.plan(probe, options, given.model, items, seed=given.seed, **where), given.as_json)
        return
    from kvnotes_interp import probes
    from kvnotes_interp.model import load

    loaded = load(given.model, **where)
    if not given.as_json:
        say(f"{loaded.name} ({loaded.source.kind}) on {loaded.device} in {str(loaded.dtype).removeprefix('torch.')}")
    with stoppable(given.out):
        result: Result = getattr(probes, probe)(
            loaded,
            items,
            **options,
            seed=given.seed,
            min_gap=given.min_gap,
            min_gap_noise=given.min_gap_noise,
            out=given.out,
            resume=given.resume,
            memory_budget=None if given.memory_budget is None else int(given.memory_budget * 2**30),
            progress=not (given.quiet or given.as_json),
        )
    emit(result.summary(), given.as_json)
    if not result.summary().counts["n_competent"]:
        say(
            f"No pair of {given.task} was competent: {loaded.name} does not change its answer, so nothing was measured."
        )
    if given.out is None:
        say("Nothing was saved: add --out runs/NAME to keep the table, the manifest and the figures.")
    else:
        kinds = result.plots()
        say(
            f"Saved in {given.out}"
            + (f"; open {given.out / 'figures' / kinds[0]}.html in a browser." if kinds else ".")
        )


def check_run(
    model: str, revision: str | None, out: Path | None = None, resume: bool = False, *, marker: str = "manifest.json"
) -> None:
    """Refuse what can be refused before torch is imported: a wrong model name, a folder that is taken."""
    from kvnotes_interp import registry

    registry.resolve(model, revision)
    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the run to go on with.")
    if out is not None and not resume and (out / marker).exists():
        raise InputError(f"{out} already holds a run. Pass --resume to take it up, or choose another folder.")
