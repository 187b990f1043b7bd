"""nnsight as the engine: local patching and head ablation, with the same Result, here or on a model that is elsewhere.

    from kvnotes_interp.adapters import nnsight
    result = nnsight.local_patching(model, pairs)                # as kv.probes.local_patching, through nnsight
    result = nnsight.head_ablation(model, pairs)                 # single heads at the decision token

    from nnsight import TransformersModel                        # NDIF: the weights stay on the server
    name = "meta-llama/Llama-3.1-70B"
    big = TransformersModel(name, task="text-generation", tokenizer=name)
    result = nnsight.local_patching(big, pairs, remote=True)

`remote=True` differs from a local run by that flag alone. It was **not** run against NDIF when this was written:
what was run is `remote="local"`, nnsight's own dry run, which serialises each request, reads it back with this package
hidden, as a server would, and runs it here.

Before anything is believed, `parity` compares nnsight with this package on the model itself (on a tiny random Llama
where the weights are elsewhere), once per model and process, and refuses a version pair that fails. What versions a
server runs it cannot see: there the identity controls, which run on every pair, are the proof.

What it costs: a copy of the cache per row, and both prompts prefilled again for every call that patches them; nothing
is shared between rows as `engine.sweep` shares it. Use it where the model does not fit, or to check this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pandas as pd
import torch

from kvnotes_interp import engine
from kvnotes_interp.adapters import parity as checking
from kvnotes_interp.adapters.ablation import Looks, ablate, check_ablations, summarise_ablation
from kvnotes_interp.adapters.cases import TracedSession
from kvnotes_interp.adapters.parity import Parity, gap, gaps_by_layer
from kvnotes_interp.adapters.traces import HeadEdit, Remote, Traced, open_nnsight
from kvnotes_interp.errors import InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes import patching
from kvnotes_interp.probes.measure import Case, check_parts, identity_controls
from kvnotes_interp.probes.request import pairs_of
from kvnotes_interp.results import Result
from kvnotes_interp.sites import Part, Site
from kvnotes_interp.tasks import EncodedPair, Pair

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

PACKAGES = ("nnsight", "transformers")


def local_patching(
    model: Any,
    pairs: Iterable[Pair] | Pair,
    *,
    remote: Remote = False,
    parts: Sequence[Part] = ("kv",),
    views: Sequence[str] = ("position", "region", "random"),
    draws: int = 8,
    map_pairs: int = 8,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: Any = None,
    resume: bool = False,
    rows: int = 16,
    progress: bool = True,
) -> Result:
    """`probes.local_patching` through nnsight: the same cells, columns, controls and summary, so the same plots.

    Args:
        model: a `Model`, whose weights are shared and which stays as it is; or an `nnsight.TransformersModel`, whose
            weights may be elsewhere.
        remote: False, True (NDIF) or "local" (the dry run); see the module's docstring.
        rows: patched caches per batch.

    The other arguments are those of `probes.local_patching`. Parts and views default to fewer cells than there, since
    each costs more.

    Raises UnsupportedError when the parity check fails, ControlError when an identity control does.
    """
    parts, views = check_parts(parts), patching._check_views(views)
    traced = _traced(model, remote, rows)
    pairs = pairs_of("local_patching", pairs)
    mapped = {pair.key for pair in pairs[:map_pairs]}
    n_layers = traced.model.shape.n_layers

    def cells(pair: EncodedPair) -> list[Any]:
        chosen = views if pair.pair.key in mapped else tuple(v for v in views if v != "layer_position")
        return list(patching.cells_of(pair, n_layers, parts=parts, views=chosen, draws=draws, seed=seed))

    def measure(case: Case) -> pd.DataFrame:
        frames = [identity_controls(case), patching.ends(case), case.rows(cells(case.pair))]
        return pd.concat(frames, ignore_index=True)

    options = {"parts": list(parts), "views": list(views), "draws": draws, "map_pairs": map_pairs, "seed": seed}
    competence = Competence(min_gap, min_gap_noise)
    with TracedSession(
        "local_patching", traced, pairs, options, competence, out=out, resume=resume, progress=progress
    ) as run:
        if run.folder.complete:
            return run.folder.result()
        frame, tried = run.run("cells", measure, cost=lambda pair: len(cells(pair)))
        summary = patching.summarise(frame, tried, model=traced.model.name, seed=seed, n_layers=n_layers)
        return run.finish(frame, tried, summary)


def head_ablation(
    model: Any,
    pairs: Iterable[Pair] | Pair,
    *,
    ablations: Sequence[str] = ("resample",),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    remote: Remote = False,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: Any = None,
    resume: bool = False,
    rows: int = 16,
    progress: bool = True,
) -> Result:
    """Take out one head at a time at the decision token of the *new* run, and see whether its decision stands.

    A head is taken out by putting something in place of its output before the output projection:

    - resample (default): its output in the old prompt of the same pair;
    - mean: its mean output at the decision token, over both prompts of all pairs of *other* contents;
    - zero: nothing.

    Recovery is that of the new run: 1 the decision stands, 0 it has gone back to the old one. All heads resampled
    together must give exactly 0, since the decision token is the same in both prompts and its MLPs follow from what
    its heads brought: a control, with two more, on every pair.

    Args:
        layers, heads: which heads; all by default.
        model, remote, rows: as in `local_patching`; the others as in `probes.local_patching`.

    Rows of the result: view "read_head", site "ablated", with `layer`, `head` and `ablation`. The summary gives, per
    ablation, what the strongest head takes away (an upper bound: it is chosen on the pairs it is measured on) and the
    mean over heads. What this does not show: heads that stand in for one another, and what a head reads.
    """
    traced = _traced(model, remote, rows)
    pairs = pairs_of("head_ablation", pairs)
    shape = traced.model.shape
    ablations = check_ablations(ablations)
    chosen = [
        (layer, head)
        for layer in _within("layers", layers, shape.n_layers)
        for head in _within("heads", heads, shape.n_heads)
    ]
    if "mean" in ablations and len({pair.content for pair in pairs}) < 2:
        raise InputError("a mean ablation takes the mean over pairs of other contents, and there is one content only.")
    options = {"ablations": list(ablations), "heads": [list(h) for h in chosen], "seed": seed}
    competence = Competence(min_gap, min_gap_noise)
    with TracedSession(
        "head_ablation", traced, pairs, options, competence, out=out, resume=resume, progress=progress
    ) as run:
        if run.folder.complete:
            return run.folder.result()
        looks = Looks(traced, run.encoded)
        frame, tried = run.run(
            "heads",
            lambda case: ablate(case, looks, chosen, ablations),  # type: ignore[arg-type]
            cost=lambda _pair: len(chosen) * len(ablations),
        )
        return run.finish(frame, tried, summarise_ablation(frame, tried, model=traced.model.name, seed=seed))


# --- parity ----------------------------------------------------------------------------------------------------------


def parity(model: Model, *, remote: Remote = False) -> Parity:
    """nnsight's runs of a model against this package's: caches, head outputs, patched and ablated decisions.

    Decisions are compared as *changes* from the unpatched one, and their gap is relative to the largest change: a patch
    that is silently not applied is off by 1.
    """
    return _compare(Traced(open_nnsight(model.hf, model.tokenizer), model, remote=remote, rows=4), model)


def _compare(traced: Traced, model: Model) -> Parity:
    limit = checking.limit_of(model)
    ids, new = (checking.sample_ids(model, 12, seed=seed) for seed in (0, 1))
    *base, last = ids
    donor, answers, n = new[:-1], (3, 4, 5, 6), len(base)
    ours, theirs = engine.prefill(model, base), engine.prefill(model, donor)
    keys, values = traced.cache(base)
    gaps = [*gaps_by_layer("keys", keys, ours.keys, limit), *gaps_by_layer("values", values, ours.values, limit)]
    seen = engine.capture(model, ours, [last], want=("heads",))
    assert seen.heads is not None
    look = traced.look(ids, answers)
    gaps += gaps_by_layer("heads", list(look.heads), seen.heads[:, 0, 0], limit)
    plain = engine.decide(model, ours, [last], answers)[0].cpu()
    gaps.append(gap("logits", None, look.logits, plain, limit))

    every = tuple(range(n))
    sites = [Site(()), Site(every), Site((1, n - 1)), Site((2, 3), part="v"), Site(every, layers=(0,), part="k")]
    mine = torch.cat([engine.decide(model, ours.patched(site, theirs), [last], answers).cpu() for site in sites])
    found = traced.decide(base, donor, last, sites, answers)
    gaps.append(gap("patched decisions", None, (found - found[:1])[1:], (mine - mine[:1])[1:], limit))

    other = engine.capture(model, theirs, [last], want=("heads",))
    assert other.heads is not None
    edits, mine_edited = [], []
    for layers, heads, outputs in (
        (range(model.shape.n_layers), range(model.shape.n_heads), other.heads[:, 0, 0]),
        ((model.shape.n_layers - 1,), range(model.shape.n_heads), torch.zeros_like(other.heads[:, 0, 0])),
        ((0,), (model.shape.n_heads - 1,), other.heads[:, 0, 0]),
    ):
        take = torch.zeros(model.shape.n_layers, model.shape.n_heads, dtype=torch.bool)
        take[[[layer] for layer in layers], list(heads)] = True
        edits.append(HeadEdit(take, outputs))
        patch = engine.HeadPatch(
            (n,),
            {layer: outputs[layer][None, None] for layer in layers},
            {layer: take[layer][None, None] for layer in layers},
        )
        edited = engine.capture(model, ours, [last], want=(), slots=(), edits=engine.Edits(heads=patch))
        mine_edited.append(engine.answer_logits(model, edited, answers))
    got = traced.decide(base, base, last, [Site(())] * 4, answers, heads=[None, *edits])
    gaps.append(gap("ablated decisions", None, (got - got[:1])[1:], torch.cat(mine_edited) - plain, limit))
    return Parity(model.name, checking.versions(*PACKAGES), tuple(gaps))


_OPEN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""transformers model -> the nnsight model over its weights that has passed the check."""


def _traced(model: Any, remote: Remote, rows: int) -> Traced:
    """How to run this model through nnsight, after the parity check has passed."""
    from kvnotes_interp.model import Model

    if isinstance(model, Model):
        if remote is True:
            raise InputError(
                f"{model.name} is loaded here. For a remote run give an nnsight.TransformersModel, whose weights are "
                "on the server; or leave remote out."
            )
        if model.hf not in _OPEN:
            nn = open_nnsight(model.hf, model.tokenizer)
            _compare(Traced(nn, model, rows=4), model).require()
            _OPEN[model.hf] = nn
        return Traced(_OPEN[model.hf], model, remote=remote, rows=rows)
    if type(model).__name__ != "TransformersModel":
        raise InputError(f"{type(model).__name__} is neither a kvnotes_interp Model nor an nnsight.TransformersModel.")
    _check_versions()
    return Traced(model, _described(model), remote=remote, rows=rows)


@lru_cache(maxsize=1)
def _check_versions() -> None:
    """The parity check on a tiny random Llama: what can be said about a version pair when the weights are elsewhere."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from kvnotes_interp.model import wrap
    from kvnotes_interp.sources import ModelSource

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = LlamaForCausalLM(config)
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    parity(wrap(hf, tokenizer, ModelSource("a tiny random Llama", "live"))).require()


def _described(nn: Any) -> Model:
    """What the probes need to know of a model whose weights may be elsewhere. Its caches are never held here."""
    from kvnotes_interp import compat
    from kvnotes_interp.model import Model
    from kvnotes_interp.rope import RopeGeometry
    from kvnotes_interp.sources import ModelSource, shape_of_config

    hf = nn._module
    compat.refuse_unsupported(hf)
    name = hf.config.name_or_path or type(hf).__name__
    note = f"through nnsight {checking.installed('nnsight')}"
    source = ModelSource(name, "live", revision=getattr(hf.config, "_commit_hash", None) or "", note=note)
    return Model(hf, nn.tokenizer, source, shape_of_config(hf.config), RopeGeometry(()), f"{name}#nnsight")


def _within(name: str, chosen: Sequence[int] | None, size: int) -> tuple[int, ...]:
    found = tuple(range(size)) if chosen is None else tuple(sorted({int(c) for c in chosen}))
    bad = [c for c in found if not 0 <= c < size]
    if bad:
        raise InputError(f"{name} holds {bad[0]}, but the model has {size} (0 to {size - 1}).")
    return found
