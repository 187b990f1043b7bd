"""Forward hooks of one pass: they record and edit the residual stream, count their calls, and are gone afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvnotes_interp import compat
from kvnotes_interp.engine.edits import Edits
from kvnotes_interp.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass
class Hooks:
    """Forward hooks that record and edit the residual stream; gone when the `with` block ends.

    `require` says whether each of them was called, once: a module that is run past its hooks is refused by name.
    """

    model: Model
    n_old: int
    slots: tuple[int, ...]
    edits: Edits
    want: frozenset[str]
    residual: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    mlp: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    made: Counter[tuple[str, int]] = field(default_factory=Counter)
    _wanted: list[str] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _reads: dict[int, Tensor] = field(default_factory=dict)
    _writes: dict[int, Tensor] = field(default_factory=dict)
    _mlps: dict[int, Tensor] = field(default_factory=dict)

    def __enter__(self) -> Hooks:
        try:
            self._register()
        except BaseException:
            self._stack.close()  # nothing of a failed set stays behind
            raise
        return self

    def _register(self) -> None:
        layers = compat.layers(self.model.hf)
        if "heads" in self.want or self.edits.heads is not None:
            for index, layer in enumerate(layers):
                projection = compat.output_projection(layer)
                self._add(
                    f"output projection of layer {index}", projection.register_forward_pre_hook, self._projected(index)
                )
        if not self.want - {"heads"} and self.edits.residual is None and not self.edits.writes:
            return
        for index, layer in enumerate(layers):
            self._add(f"input of layer {index}", layer.register_forward_pre_hook, self._before(index), with_kwargs=True)
            writing = compat.attention_write(layer)
            self._add(f"attention of layer {index}", writing.register_forward_hook, self._wrote(index, layer))
            if self._apart:
                mlp = compat.mlp_write(layer)
                self._add(f"MLP of layer {index}", mlp.register_forward_hook, self._fed(index, layer))
            self._add(f"output of layer {index}", layer.register_forward_hook, self._after(index))
        norm, last = compat.final_norm(self.model.hf), f"output of layer {len(layers) - 1}"
        # NanoChat norms the embeddings with the same module: it is the final norm once the last layer has run.
        after = lambda: bool(self.fired[last])  # noqa: E731
        self._add("final norm", norm.register_forward_pre_hook, self._before(len(layers)), after, with_kwargs=True)

    @property
    def _apart(self) -> bool:
        """Whether a layer's output is taken apart into what its attention and its MLP wrote."""
        return bool(self.want & {"attention", "mlp"} or self.edits.writes)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def require(self) -> None:
        """Raise UnsupportedError, naming the module, unless every hook was called exactly once."""
        wrong = [name for name in self._wanted if self.fired[name] != 1]
        if wrong:
            raise UnsupportedError(
                f"{type(self.model.hf).__name__}: the hook on the {wrong[0]} was called {self.fired[wrong[0]]} times, "
                "not once, so what was asked for was not recorded or applied. This model runs its modules in "
                "a way of its own; records and edits are refused on it."
            )

        asked = Counter((patch.part, layer) for patch in self.edits.writes for layer in patch.outputs)
        asked += Counter(("heads", layer) for layer in (self.edits.heads.outputs if self.edits.heads else ()))
        asked += Counter(("residual", layer) for layer in (self.edits.residual.add if self.edits.residual else ()))
        if self.made != asked:
            part, layer = min(self.made.keys() ^ asked.keys() or asked.keys())
            raise UnsupportedError(f"{self.model.name}: the edit of {part} in layer {layer} was not made once.")

    def _add(
        self,
        name: str,
        register: Callable[..., Any],
        hook: Callable[..., Any],
        due: Callable[[], bool] = lambda: True,
        **options: Any,
    ) -> None:
        def counted(*args: Any) -> Any:
            if not due():
                return None
            self.fired[name] += 1
            return hook(*args)

        self._wanted.append(name)
        self._stack.callback(register(counted, **options).remove)

    def _at(self, slots: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor([s - self.n_old for s in slots], device=device)

    def _kept(self, hidden: Tensor) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        return hidden[:, self._at(self.slots, hidden.device)].to(exact)

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            patch = self.edits.residual
            if patch is not None and index in patch.add:
                hidden = hidden.clone()
                hidden[:, self._at(patch.slots, hidden.device)] += patch.add[index].to(hidden.device, hidden.dtype)
                self.made["residual", index] += 1
                args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
            if "residual" in self.want:
                self.residual[index] = self._kept(hidden)
            self._reads[index] = hidden
            return args, kwargs

        return hook

    def _projected(self, index: int) -> Callable[..., Any]:
        n_heads = self.model.shape.n_heads

        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            outputs = args[0].unflatten(-1, (n_heads, -1))
            patch = self.edits.heads
            if patch is not None and index in patch.outputs:
                at, outputs = self._at(patch.queries, outputs.device), outputs.clone()
                theirs = patch.outputs[index].to(outputs.device, outputs.dtype)
                if theirs.shape[-1] != outputs.shape[-1]:
                    raise InputError(
                        f"heads.outputs[{index}]: d_head {theirs.shape[-1]}, the model's {outputs.shape[-1]}."
                    )
                outputs[:, at] = torch.where(patch.take[index].to(outputs.device)[..., None], theirs, outputs[:, at])
                self.made["heads", index] += 1
            if "heads" in self.want:
                self.heads[index] = self._kept(outputs)
            return (outputs.flatten(-2), *args[1:])

        return hook

    def _wrote(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        scale = compat.residual_scale(layer)

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            written = output[0] if isinstance(output, tuple) else output
            for patch in self.edits.writes:
                if patch.part == "attention" and index in patch.outputs:
                    written = written.clone()
                    theirs = patch.outputs[index].to(written.device, written.dtype) / scale
                    written[:, self._at(patch.slots, written.device)] = theirs
                    self.made["attention", index] += 1
            self._writes[index] = written * scale
            if "attention" in self.want:
                self.attention[index] = self._kept(written * scale)
            return (written, *output[1:]) if isinstance(output, tuple) else written

        return hook

    def _fed(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        scale = compat.residual_scale(layer)

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._mlps[index] = (output[0] if isinstance(output, tuple) else output) * scale

        return hook

    def _require_sum(self, index: int, before: Tensor, hidden: Tensor) -> None:
        """Raise UnsupportedError unless the layer's output is what it read and what its parts wrote, and no more."""
        if not bool(torch.isfinite(hidden).all()):
            return  # which is said of the pass as a whole
        gap = (hidden - before - self._mlps.pop(index).view_as(hidden)).abs().max()
        size = max(float(hidden.abs().max()), float(before.abs().max()), 1.0)
        if not float(gap) <= 64 * torch.finfo(hidden.dtype).eps * size:
            raise UnsupportedError(
                f"{type(self.model.hf).__name__}: the output of layer {index} is not what it read plus what attention "
                f"and MLP wrote (off by {float(gap):.2g}). Records and patches of writes are refused on this model."
            )

    def _after(self, index: int) -> Callable[..., Any]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if index not in self._reads or index not in self._writes:
                return output  # a hook was passed by: `require` says so
            before = self._reads.pop(index) + self._writes.pop(index)
            if self._apart and index in self._mlps:
                self._require_sum(index, before, hidden)
            for patch in self.edits.writes:
                if patch.part == "mlp" and index in patch.outputs:
                    at = self._at(patch.slots, hidden.device)
                    hidden = hidden.clone()
                    hidden[:, at] = before[:, at] + patch.outputs[index].to(hidden.device, hidden.dtype)
                    self.made["mlp", index] += 1
            if "mlp" in self.want:
                self.mlp[index] = self._kept(hidden) - self._kept(before)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook
