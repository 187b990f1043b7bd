"""Folders of trained compactors of both kinds: a run's `best`, read once until written anew, and files that are off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvnotes_interp import engine
from kvnotes_interp.downloads import sha256
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators import eviction
from kvnotes_interp.operators.scorer import Scorer, ScorerSettings, new_scorer
from kvnotes_interp.operators.still import Still, StillSettings, new_still
from kvnotes_interp.probes.compaction.points import points_of, trained
from tests.tiny import tiny

IDS = torch.randint(3, 97, (12,), generator=torch.Generator().manual_seed(0)).tolist()


def made(kind: str, seed: int = 0) -> Any:
    model = tiny("llama")
    if kind == "still":
        return new_still(model, settings=StillSettings(seed=seed, init="plain"))
    return new_scorer(model, settings=ScorerSettings(seed=seed))


def compacted(name: str) -> list[torch.Tensor]:
    model = tiny("llama")
    return list(eviction.find(name)(model, engine.prefill(model, IDS), budget=4).cache.keys)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("kind", "read"), [("still", Still), ("scorer", Scorer)])
def test_a_runs_folder_stands_for_its_best(kind: str, read: Any, tmp_path: Path, monkeypatch: Any) -> None:
    model, reads = tiny("llama"), []
    real = read.set
    monkeypatch.setattr(read, "set", lambda *a: reads.append(a) or real(*a))
    made(kind).save(tmp_path / "best")
    name = f"{kind}@{tmp_path}"
    assert same(compacted(name), compacted(f"{name}/best"))
    assert read.load(tmp_path, model).fingerprint == made(kind).fingerprint
    before, n = compacted(name), len(reads)
    assert same(compacted(name), before)
    assert n == 2  # once by name, once by `load`
    made(kind, seed=1).save(tmp_path / "best")  # written anew, it is read anew
    assert not same(compacted(name), before)
    own = made(kind, seed=2)
    own.save(tmp_path)  # a folder's own compactor comes before a best one
    assert read.load(tmp_path, model).fingerprint == own.fingerprint


def test_manifests_get_the_hash_of_each_description(tmp_path: Path) -> None:
    for kind in ("still", "scorer"):
        made(kind).save(tmp_path / "run" / "best")
    names = [f"{kind}@{tmp_path / 'run'}" for kind in ("still", "scorer")]
    found = trained(points_of([*names, "snapkv"], [2.0, 4.0]))
    assert found == {
        name: sha256(tmp_path / "run" / "best" / f"{kind}.json")
        for name, kind in zip(names, ("still", "scorer"), strict=True)
    }
    with pytest.raises(InputError, match=r"no scorer\.json in"):
        trained(points_of([f"scorer@{tmp_path}"], [2.0]))


@pytest.mark.parametrize(("kind", "read"), [("still", Still), ("scorer", Scorer)])
def test_what_is_not_there_or_not_whole_is_refused(kind: str, read: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(InputError, match=f"write {kind}@FOLDER"):
        compacted(kind)
    with pytest.raises(InputError, match=rf"no {kind}\.json in .* nor in its best.*kvprobe train {kind}"):
        compacted(f"{kind}@{tmp_path}")
    folder = made(kind).save(tmp_path / "one")
    with pytest.raises(InputError, match="belongs to 'tiny-llama"):
        read.load(folder, tiny("qwen2"))
    (folder / f"{kind}.safetensors").write_bytes(b"\1")
    with pytest.raises(InputError, match=rf"is not the file that {kind}\.json describes"):
        read.load(folder, model)
    (folder / f"{kind}.safetensors").unlink()
    with pytest.raises(InputError, match="is missing"):
        read.load(folder, model)
    (folder / f"{kind}.json").write_text('{"format": "writer/1"}', encoding="utf-8")
    with pytest.raises(InputError, match=f"format '{kind}/1'.*writer/1"):
        read.load(folder, model)
