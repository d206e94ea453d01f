"""Objects by import path: ``package.module:name``, or ``./file.py:name`` for a file outside any package."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from protocols.errors import UserError, unknown


def is_import_path(name: str) -> bool:
    """Whether a name is an import path rather than a short name."""
    return ":" in name


def load_object(path: str, kind: str) -> Any:
    """The object at an import path.

    Args:
        path: ``package.module:name`` or ``file.py:name``, the file relative to the working directory.
        kind: what is being loaded, in words, for the error.

    Raises:
        UserError: no such module, file or name, or the module fails to import.
    """
    location, _, name = path.partition(":")
    if not location or not name:
        raise UserError(f"{kind} {path!r} is not an import path: write package.module:name or ./file.py:name")
    module = _module(location, path, kind)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [
            other
            for other, value in vars(module).items()
            if not other.startswith("_") and not isinstance(value, ModuleType) and other != "annotations"
        ]
        raise unknown(f"name in {location}", name, public) from None


def code_version(path: str) -> tuple[str, str]:
    """(module or file, its ``__version__`` if it declares one, else the SHA-256 of its source) for an import path."""
    location = path.partition(":")[0]
    module = _module(location, path, "module")
    version = getattr(module, "__version__", None)
    if version is None:
        source = getattr(module, "__file__", None)
        version = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else "unknown"
    return location, str(version)


def _module(location: str, path: str, kind: str) -> ModuleType:
    try:
        if not location.endswith(".py"):
            return importlib.import_module(location)
        file = Path(location).resolve()
        if not file.is_file():
            raise UserError(f"{kind} {path!r}: there is no file {location}")
        # The name carries the folder, so that two files of one name do not shadow each other.
        name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(f"{kind} {path!r}: no module named {error.name!r}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{kind} {path!r}: importing it fails with {type(error).__name__}: {error}") from error
