"""What to run: sources of nondeterminism, recipes, cells, protocols and the runs they expand to.

This package knows neither how a run is trained nor where its record is kept.
"""

from protocols.errors import UserError
from protocols.load import PROTOCOLS, load_protocol
from protocols.overrides import apply_settings, select_cells
from protocols.perturbation import Perturbation
from protocols.protocol import MEASURES, Cell, DatasetSpec, Protocol, grid
from protocols.recipe import Recipe
from protocols.run import Run, run_from_specification
from protocols.sources import LIBRARY_KINDS, SOURCES, Source, all_but_one, factorial
from protocols.until import Until

__all__ = [
    "LIBRARY_KINDS",
    "MEASURES",
    "PROTOCOLS",
    "SOURCES",
    "Cell",
    "DatasetSpec",
    "Perturbation",
    "Protocol",
    "Recipe",
    "Run",
    "Source",
    "Until",
    "UserError",
    "all_but_one",
    "apply_settings",
    "factorial",
    "grid",
    "load_protocol",
    "run_from_specification",
    "select_cells",
]
