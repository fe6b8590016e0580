"""From image files on a shared filesystem to batches on the device.

What a program needs is offered here, and loaded when it is first asked for, so that `import datapipe` takes no time
and packing needs no torch:

    from datapipe import open_loader, pack, stage
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in _HOMES, for type checkers and editors
    from .dataset import DataSet as DataSet
    from .dataset.verify import verify as verify
    from .errors import DatapipeError as DatapipeError
    from .errors import SettingError as SettingError
    from .images.recode import RecodeOptions as RecodeOptions
    from .loaders import Batch as Batch
    from .loaders import Loader as Loader
    from .loaders import normalise as normalise
    from .loaders import open_loader as open_loader
    from .packing import PackOptions as PackOptions
    from .packing import convert as convert
    from .packing import pack as pack
    from .sampling.augment import Augment as Augment
    from .staging import stage as stage
    from .staging import stage_once as stage_once

__version__ = "0.1.0"

_HOMES = {  # the module that each name is loaded from
    "Augment": "sampling.augment",
    "Batch": "loaders",
    "DataSet": "dataset",
    "DatapipeError": "errors",
    "Loader": "loaders",
    "PackOptions": "packing",
    "RecodeOptions": "images.recode",
    "SettingError": "errors",
    "convert": "packing",
    "normalise": "loaders",
    "open_loader": "loaders",
    "pack": "packing",
    "stage": "staging",
    "stage_once": "staging",
    "verify": "dataset.verify",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'datapipe' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
