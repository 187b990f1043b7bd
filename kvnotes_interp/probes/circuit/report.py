"""The summary of a circuit ablation: means over competent pairs with intervals over contents, draws averaged first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvnotes_interp.probes.estimates import Estimates
from kvnotes_interp.results import Summary

_RANKED = {"other_half": "", "same_pair": "_same_pair", "random": "_random"}
_NOTES = {"same_pair": "upper bound: ranked on itself", "random": "as many at random"}


def summarise(
    frame: pd.DataFrame, tried: pd.DataFrame, *, model: str, seed: int, ks: Sequence[int], analyses: Sequence[str]
) -> Summary:
    """One row per quantity that was measured, in the order of the analyses; the main one of each is always there."""
    found = Estimates(seed=seed)
    good = frame[frame["readout"] == "recovery"]
    for site in ("field_only", "downstream_only"):
        found.add(site, good[(good["view"] == "state") & (good["site"] == site)])
    _knockout(found, frame)
    _read(found, frame, ks)
    _write(found, frame, ks)
    _scrub(found, frame)
    _dose(found, frame)
    main = {
        "knockout": "cut_top25",
        "read_heads": f"read_top{ks[-1]}",
        "write_heads": f"write_frozen_top{ks[-1]}",
        "mlp_share": "attention_share",
        "scrub": "scrub_opposite_note",
        "dose": "dose_k8",
    }
    found.require("field_only", "downstream_only", *(main[a] for a in analyses))
    return found.summary(f"circuit ablation on {model}", frame, tried)


def mean_of(rows: pd.DataFrame) -> pd.DataFrame:
    """One value per pair: its draws averaged."""
    return rows.groupby(["pair", "content"], as_index=False)[["value"]].mean()


def _pick(frame: pd.DataFrame, **where: object) -> pd.DataFrame:
    for column, value in where.items():
        # A column that does not apply is missing, and must not match.
        frame = frame[(frame[column] == value).fillna(False).astype(bool)]
    return frame


def _knockout(found: Estimates, frame: pd.DataFrame) -> None:
    for site in ("field", "downstream", "sink"):
        found.add(
            f"attention_{site}",
            _pick(frame, view="attention", site=site, base="field_only"),
            "share of the decision token's attention, field-only cache",
        )
    curve = _pick(frame, view="knockout", readout="recovery")
    flips = _pick(frame, view="knockout", readout="flip")
    for share in sorted(set(curve["share"].dropna()) - {0.0}):
        name, here = f"cut_top{share * 100:.0f}", _pick(curve, share=share)
        found.add(name, mean_of(_pick(here, band="all", ranking="attention")), "recovery, field-only cache")
        if share == 0.25:
            found.add(f"{name}_random", mean_of(_pick(here, band="all", ranking="random")), "as many random positions")
            chosen = _pick(flips, share=share, band="all", ranking="attention")
            found.add(f"{name}_flips", mean_of(chosen), "share of pairs that turn to the new answer")
            for band in ("early", "mid", "late"):
                found.add(
                    f"{name}_{band}", mean_of(_pick(here, band=band, ranking="attention")), "this third of layers"
                )
    edge = _pick(frame, view="edge", readout="recovery")
    for base in ("field_only", "oracle"):
        for site in ("field", "downstream", "sink"):
            for ranking in ("chosen", "random"):
                name = f"cut_{site}_{base}" + ("" if ranking == "chosen" else "_random")
                note = f"{base.replace('_', '-')} cache" if ranking == "chosen" else "as many random keys"
                found.add(name, mean_of(_pick(edge, base=base, site=site, ranking=ranking)), note)


def _curve(found: Estimates, rows: pd.DataFrame, name: str, ks: Sequence[int], note: str) -> None:
    """Every k of the ranking that counts; the upper bound and the random sets at the largest k. The table has all."""
    for k in ks:
        found.add(f"{name}_top{k}", mean_of(_pick(rows, k=k, ranking="other_half")), note)
    for ranking in ("same_pair", "random"):
        found.add(
            f"{name}_top{ks[-1]}{_RANKED[ranking]}", mean_of(_pick(rows, k=ks[-1], ranking=ranking)), _NOTES[ranking]
        )


def _read(found: Estimates, frame: pd.DataFrame, ks: Sequence[int]) -> None:
    shares = _pick(frame, view="read_head", readout="dla_share")
    if shares.empty:
        return
    found.add("dla_heads", _summed(shares), "share of the score's change, all heads")
    found.add("dla_mlps", _summed(_pick(frame, view="attribution", site="mlp", readout="dla_share")), "all MLPs")
    means = shares.groupby(["layer", "head"])["value"].mean()
    layer, head = (int(i) for i in means.index[int(means.to_numpy(float).argmax())])
    value = float(means.to_numpy(float).max())
    own = _pick(shares, layer=layer, head=head)
    found.add("dla_best_head", own, f"layer {layer}, head {head}: {value:.2f} of the change")
    curve = _pick(frame, view="read_curve", readout="recovery")
    _curve(found, _pick(curve, site="patched"), "read", ks, "heads patched at the decision token")
    for ablation in dict.fromkeys(curve["ablation"].dropna()):
        rows = _pick(curve, site="ablated", ablation=ablation)
        if ablation:
            _curve(
                found, rows, f"read_{ablation}", ks[-1:], f"{ablation}-ablated in the new run: 1 where nothing is lost"
            )


def _summed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.groupby(["pair", "content"], as_index=False)[["value"]].sum()


def _write(found: Estimates, frame: pd.DataFrame, ks: Sequence[int]) -> None:
    curve = _pick(frame, view="write_curve", readout="recovery")
    for mode, note in (("frozen", "all other positions old"), ("recomputed", "the rest recomputed")):
        rows = _pick(curve, site=mode)
        _curve(found, rows, f"write_{mode}", ks if mode == "frozen" else ks[-1:], f"patched at the aggregators, {note}")
        found.add(f"write_{mode}_all_heads", _pick(rows, ranking="all"), note)
    share = _pick(frame, view="write_share", readout="recovery", band="frozen")
    for arm in ("attention", "mlp", "both"):
        found.add(f"write_share_{arm}", _pick(share, site=arm), "writes at the aggregators, other kind old; frozen")
    found.add(
        "attention_share", attention_share(share), "attention / (attention + MLP); above 1 where MLPs work against it"
    )


def attention_share(share: pd.DataFrame) -> pd.DataFrame:
    """Per pair: what attention's writes recover over what either kind recovers; pairs with next to nothing left out."""
    if share.empty:
        return share
    wide = share.pivot_table(index=["pair", "content"], columns="site", values="value", aggfunc="first").reset_index()
    total = wide["attention"] + wide["mlp"]
    wide = wide.assign(value=np.where(total >= 0.1, wide["attention"] / total.where(total >= 0.1), np.nan))
    return wide.dropna(subset=["value"])


def _scrub(found: Estimates, frame: pd.DataFrame) -> None:
    rows = frame[frame["view"] == "scrub"]
    notes = {
        "same_note": ("drift", "note from a prompt of the same conclusion: |change| / gap"),
        "opposite_note": ("recovery", "the false note alone"),
        "opposite_rest": ("recovery", "everything else"),
        "opposite_note_other": ("recovery", "the false note of another pair"),
    }
    for site, (readout, note) in notes.items():
        for ranking in ("other_half", "random"):
            name = f"scrub_{site}" + _RANKED[ranking]
            here = _pick(rows, site=site, readout=readout, ranking=ranking)
            found.add(name, mean_of(here), note if ranking == "other_half" else "as many random positions")
    for site in ("opposite_note", "opposite_rest"):
        found.add(f"scrub_{site}_flips", mean_of(_pick(rows, site=site, readout="flip", ranking="other_half")), "flips")


def _dose(found: Estimates, frame: pd.DataFrame) -> None:
    rows = frame[frame["view"] == "dose"]
    for readout, name in (("recovery", "dose"), ("flip", "followed")):
        note = {"dose": "false note, both ways", "followed": "share of competent pairs that follow it"}[name]
        here = _pick(rows, readout=readout)
        for k in (1, 4, 8, 16):
            found.add(f"{name}_k{k}", mean_of(_pick(here, k=k, ranking="other_half")), note)
        found.add(f"{name}_k8_random", mean_of(_pick(here, k=8, ranking="random")), "as many random positions")
