"""When a transformer answers, does it read the fact again, or the note it took while reading?

    import kvnotes_interp as kv
    model = kv.load("smollm2-135m")
    result = kv.probes.local_patching(model, kv.tasks.pronoun(n=64, seed=0))
    result.summary()

Every name below is imported on first use (PEP 562): `import kvnotes_interp` and `kvprobe --help` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that defines it
_NAMES = {
    "load": "model",
    "Model": "model",
    "KVCache": "cache",
    "CompactCache": "compact",
    "Site": "cache",
    "Result": "results",
    "Run": "results",
    "Summary": "results",
    "Control": "results",
    "KVNotesError": "errors",
    "InputError": "errors",
    "TokenLengthError": "errors",
    "UnsupportedError": "errors",
    "ControlError": "errors",
}
_MODULES = (
    "adapters",
    "engine",
    "errors",
    "metrics",
    "operators",
    "organisms",
    "plots",
    "probes",
    "results",
    "sources",
    "tasks",
    "training",
)

__all__ = ["__version__", *_NAMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from . import engine as engine
    from . import errors as errors
    from . import metrics as metrics
    from . import plots as plots
    from . import probes as probes
    from . import results as results
    from . import sources as sources
    from . import tasks as tasks
    from .cache import KVCache as KVCache
    from .cache import Site as Site
    from .compact import CompactCache as CompactCache
    from .errors import ControlError as ControlError
    from .errors import InputError as InputError
    from .errors import KVNotesError as KVNotesError
    from .errors import TokenLengthError as TokenLengthError
    from .errors import UnsupportedError as UnsupportedError
    from .model import Model as Model
    from .model import load as load
    from .results import Control as Control
    from .results import Result as Result
    from .results import Run as Run
    from .results import Summary as Summary


def __getattr__(name: str) -> Any:
    """Import what `name` stands for and keep it, so that the next look-up is an ordinary one."""
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    elif name in _MODULES:
        try:
            value = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":  # a missing dependency of that module: say so
                raise
            raise AttributeError(f"module {__name__!r} has no part {name!r} in this version") from None
    else:
        from .errors import nearest

        hint = nearest(name, [*_NAMES, *_MODULES])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
