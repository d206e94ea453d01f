"""A sweep's records as tables: one row a cell, one row a group's control, one row a pair of replicates."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from orchestrator.analysis import across, contrasts, examples, kept, measures, mitigations, stopping
from orchestrator.analysis.cell import Measured, measure
from orchestrator.analysis.controls import NOT_HELD, Verdict, judge
from orchestrator.analysis.notes import notes
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.runs import Planned, read_runs, source_order
from orchestrator.analysis.stopping import Stopping
from orchestrator.looks import read_looks
from orchestrator.store import Store, open_store
from protocols.errors import UserError, unknown
from protocols.protocol import Protocol
from protocols.sources import ALL, CONTROL, source_title

GROUP = ("group", "trainer", "architecture", "dataset", "base_seed", "recipe")

TABLE = (
    *("trainer", "architecture", "dataset", "source", "library", "asynchrony", "n", "missing", "diverged"),
    *(f"{name}{end}" for name in QUANTITIES for end in ("", "_low", "_high")),
    *(f"paper_{name}{end}" for name in ("accuracy_sd", "cross_entropy_sd") for end in ("", "_se")),
    *("group", "base_seed", "recipe", "control", "valid", "notes"),
)
"""The columns of :meth:`Sweep.table`."""

PAIRWISE = ("disagreement", "correlation", "pearson", "ensemble_gain")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The runs of one row of the table."""

    group: str
    source: str
    library: str
    asynchrony: str
    runs: pd.DataFrame
    """Finished or not, by replicate."""

    @property
    def label(self) -> str:
        """The source as tables and figures show it, e.g. ``library (order)``."""
        return source_title(self.source, self.library, self.asynchrony)

    @property
    def is_control(self) -> bool:
        """Whether nothing varies."""
        return self.source == CONTROL

    @property
    def ok(self) -> pd.DataFrame:
        """The runs that finished with finite losses and logits."""
        return self.runs[self.runs["outcome"] == "ok"]

    def count(self, outcome: str) -> int:
        """How many runs have that outcome."""
        return int((self.runs["outcome"] == outcome).sum())

    @property
    def missing(self) -> int:
        """How many planned runs have no record."""
        return int(self.runs["outcome"].isna().sum())


def load(
    store: Store | str | os.PathLike[str],
    protocol: Protocol | None = None,
    planned: Sequence[Planned] | None = None,
) -> Sweep:
    """Read a store for analysis, finished or still being filled.

    Args:
        store: a store, or where one lies.
        protocol: what was declared before looking; reports show it.
        planned: the runs that should be there. Only these enter, and those without a record count as missing.
            Without it every record of the store enters and nothing is missing.

    Raises:
        UserError: there is no store of a known version at that place.
    """
    opened = open_store(store) if isinstance(store, str | os.PathLike) else store
    # With a plan, a store that is still to come is one in which everything is missing.
    if planned is None and isinstance(store, str | os.PathLike) and not opened.exists:
        raise UserError(f"there is no store at {os.fspath(store)}")
    recorded = read_looks(opened.looks(protocol.until.declaration)) if protocol and protocol.until else {}
    if planned is None:
        growing = list(dict.fromkeys(cell for cell, _ in recorded))
    else:  # of any plan: only the planner's own knows of looks
        growing = [one.run.id for one in planned if getattr(one, "adaptive", False) and one.run.replicate == 0]
    decided = Stopping(protocol.until if protocol else None, growing, recorded)
    return Sweep(opened, read_runs(opened, planned), protocol, decided)


class Sweep:
    """The runs of a sweep and everything that is computed from them, each number once and on first use.

    Logits are read cell by cell, so memory is one cell's at a time.
    """

    def __init__(
        self, store: Store, runs: pd.DataFrame, protocol: Protocol | None = None, stopping: Stopping | None = None
    ) -> None:
        self.store = store
        self.runs = runs
        """One row a run, see :func:`orchestrator.analysis.runs.read_runs`."""
        self.protocol = protocol
        self.stopping = stopping or Stopping(None, (), {})
        """What looks decided of the number of replicates."""
        self._tables: dict[Callable[[Sweep], pd.DataFrame], pd.DataFrame] = {}

    @cached_property
    def groups(self) -> pd.DataFrame:
        """One row a group, sorted: ``group, trainer, architecture, dataset, base_seed, recipe``."""
        groups = self.runs[list(GROUP)].drop_duplicates("group")
        return groups.sort_values(list(GROUP[1:])).reset_index(drop=True)

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells by group, the control first and ``all`` last."""
        order = {group: number for number, group in enumerate(self.groups["group"])}
        cells = [
            Cell(
                group=str(group),
                source=str(source),
                library=str(library),
                asynchrony=str(asynchrony),
                runs=runs.sort_values("replicate"),
            )
            for (group, source, library, asynchrony), runs in self.runs.groupby(
                ["group", "source", "library", "asynchrony"]
            )
        ]
        return sorted(cells, key=lambda cell: (order[cell.group], source_order(cell.source), cell.library))

    def group_title(self, group: str) -> str:
        """A group in words: trainer, architecture and dataset, and base seed and recipe where there are several."""
        row = self.groups[self.groups["group"] == group].iloc[0]
        seed = f"base seed {row['base_seed']}" if self.groups["base_seed"].nunique() > 1 else ""
        parts = (row["trainer"], row["architecture"], row["dataset"], seed, row["recipe"])
        return " · ".join(str(part) for part in parts if part)

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The control's verdict on every group."""
        # Diverged runs, too: what is held is held bit for bit, also on the way to infinity.
        finished = self.runs[self.runs["outcome"].isin(["ok", "diverged"])]
        verdicts = {}
        for group in self.groups["group"]:
            records = finished[finished["group"] == group]
            control = records["source"] == CONTROL
            verdicts[group] = judge(records[control], records[~control])
        return verdicts

    def controls(self) -> pd.DataFrame:
        """One row a group: its identity, and the fields of :class:`~orchestrator.analysis.controls.Verdict`."""
        verdicts = [vars(self.verdicts[group]) for group in self.groups["group"]]
        return pd.concat([self.groups, pd.DataFrame(verdicts, columns=list(Verdict.__annotations__))], axis=1)

    @cached_property
    def measured(self) -> list[Measured]:
        """The measures of each cell of :attr:`cells`."""
        return [self._measure(cell) for cell in self.cells]

    def notes(self, cell: Cell, measured: Measured) -> list[str]:
        """What a reader of the cell's row must know."""
        held = self.verdicts[cell.group].verdict != NOT_HELD
        found = notes(cell.source, cell.library, cell.runs, measured, held)
        looked = self.stopping.note(cell)
        return [looked, *found] if looked else found

    def table(self) -> pd.DataFrame:
        """One row a cell.

        Columns: what the cell is (``trainer, architecture, dataset, source, library``), how many of its runs are ``ok``
        (``n``), planned but without a record (``missing``) and ``diverged``; then every name of ``QUANTITIES`` (percent
        where its unit is ``%``) with ``_low`` and ``_high`` of its 95 % interval (of the accuracy SD of cells that were
        looked at, at the level of the looks, see ``notes``); the papers' conventions
        ``paper_accuracy_sd, paper_accuracy_sd_se, paper_cross_entropy_sd, paper_cross_entropy_sd_se`` (ddof=0 and
        bootstrap standard error); ``group, base_seed, recipe``; ``control``, the group's verdict; ``valid``, False
        where that is ``not held``; and ``notes``: what was left out, and why a value or an interval is NaN.
        """
        rows = []
        for cell, measured in zip(self.cells, self.measured, strict=True):
            first = cell.runs.iloc[0]
            row: dict[str, Any] = {name: first[name] for name in TABLE if name in first.index}
            row |= {"n": len(cell.ok), "missing": cell.missing, "diverged": cell.count("diverged")}
            for name, estimate in measured.estimates.items():
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            row |= {f"paper_{name}": value for name, value in measured.papers.items()}
            verdict = self.verdicts[cell.group].verdict
            row |= {"control": verdict, "valid": verdict != NOT_HELD, "notes": "; ".join(self.notes(cell, measured))}
            rows.append(row)
        return pd.DataFrame(rows, columns=list(TABLE))

    def pairwise(self, measure: str) -> pd.DataFrame:
        """One row a pair of replicates of one cell.

        Args:
            measure: ``disagreement``, ``correlation``, ``pearson`` or ``ensemble_gain``.

        Returns:
            Columns ``group, trainer, architecture, dataset, source, library, replicate_a, replicate_b, id_a, id_b,
            value``, the value in the unit of :meth:`table`.

        Raises:
            UserError: no measure of pairs has that name.
        """
        if measure not in PAIRWISE:
            raise unknown("measure of pairs", measure, PAIRWISE)
        columns = ["group", "trainer", "architecture", "dataset", "source", "library"]
        frames = []
        for cell, measured in zip(self.cells, self.measured, strict=True):
            if measure in measured.pairs:
                pairs = measured.pairs[measure]
                runs = cell.ok.iloc[list(pairs.models)]
                first, second = np.triu_indices(len(runs), k=1)
                frame = runs.iloc[first][columns].reset_index(drop=True)
                for name in ("replicate", "id"):
                    values = runs[name].to_numpy()
                    frame[f"{name}_a"], frame[f"{name}_b"] = values[first], values[second]
                frames.append(frame.assign(value=pairs.matrix[first, second]))
        names = [*columns, "replicate_a", "replicate_b", "id_a", "id_b", "value"]
        return pd.concat(frames, ignore_index=True)[names] if frames else pd.DataFrame(columns=names)

    def disagreement_map(self, group: str, per_cell: int) -> tuple[pd.DataFrame, NDArray[np.float64]]:
        """Disagreement between the models of a group, within and across its cells.

        Args:
            group: the group's name.
            per_cell: the first so many finished replicates of each cell enter.

        Returns:
            The models' runs by cell, with the cell's ``label``, and their (models, models) matrix in percent; both are
            empty where the models were not tested on the same examples.
        """
        cells = [cell for cell in self.cells if cell.group == group]
        models = pd.concat([cell.ok.head(per_cell).assign(label=cell.label) for cell in cells], ignore_index=True)
        known = [values for values in self.arrays(models["id"], "predictions") if values is not None]
        if len(known) < len(models) or models["labels_fingerprint"].nunique() != 1:
            return models.head(0), np.empty((0, 0))
        return models, 100 * measures.disagreement(np.stack(known))

    def histories(self) -> list[pd.DataFrame]:
        """For each cell the epochs of its finished replicates: the run's ``id`` and the columns of a history."""
        frames = []
        for cell in self.cells:
            table = self.store.table(["id", "history"], list(cell.ok["id"]))
            histories = table["history"].combine_chunks()
            frame = pa.Table.from_struct_array(histories.flatten()).to_pandas()
            frame.insert(0, "id", np.repeat(table["id"].to_pylist(), pc.list_value_length(histories).to_numpy()))
            frames.append(frame)
        return frames

    def compare(self, first: str, second: str) -> pd.DataFrame:
        """Whether two sources vary alike, in every group that has both: one row a measure.

        The five measures enter as numbers that are 0 where replicates do not differ, correlation as ``1 - rho``, in the
        unit of :meth:`table`. Columns: those of :meth:`shares`.

        Args:
            first: a source or its label, e.g. ``onebit``.
            second: what it is held against: ``reference`` in the result.

        Raises:
            UserError: no cell of this sweep has such a name.
        """
        return contrasts.between(self, first, second)

    def shares(self, reference: str = ALL) -> pd.DataFrame:
        """Every cell against the reference of its group: one row a cell and measure, as in :meth:`compare`.

        Columns: what the cell is; ``reference``; ``measure``; ``n, n_reference`` replicates; ``value,
        value_reference``; their ``ratio`` and ``difference`` and, for the two SDs, the ``share`` of the reference's
        variance (the ratio's square), each with ``_low`` and ``_high`` of its 95 % interval; the ``margin`` and the
        ``verdict`` (``same``, ``different``, ``cannot say``, see :func:`orchestrator.analysis.comparisons.compare`);
        ``notes``: why the ratio or its interval is NaN.
        """
        return contrasts.shares(self, reference)

    def mitigations(self) -> pd.DataFrame:
        """What reduces the noise: one row a base cell (``kind`` is ``base``) and one for whatever is held against it.

        ``evaluation``: another evaluation of the same trained models, paired by model. ``recipe``: another training,
        unpaired, also where it was evaluated otherwise, too. ``ensemble``: the base's models averaged in blocks of the
        protocol's ``ensemble``, paired by block. The base recipe of a network and dataset is that of the protocol's
        first cell with these; without a protocol only evaluations are known.

        Columns: the base's ``group, trainer, architecture, dataset, base_seed, source, label``; ``mitigation, kind,
        paired, n, n_base``; the mean accuracy and the five measures with their intervals; for each measure
        ``_reduction`` in percent with its interval and ``_verdict`` of after against before; ``reduction``, the mean of
        the five (Summers & Dinneen 2021); ``training_cost`` and ``inference_cost``, times those of the base: training
        examples visited, and forward passes for each test example; ``notes``.
        """
        return self._once(mitigations.mitigations)

    def cka(self) -> pd.DataFrame:
        """How alike replicates represent the same test examples: one row a cell and layer, where layers were kept.

        Columns: what the cell is; ``layer`` and its ``depth`` from the input; ``n`` replicates, ``examples``; ``cka``,
        the mean over pairs of the unbiased centred kernel alignment, with its interval; ``notes``.
        """
        return self._once(kept.cka)

    def equality(self) -> pd.DataFrame:
        """Trained weights held against each other: one row a cell and tensor.

        Columns: what the cell is; ``tensor``; ``n`` replicates, ``pairs`` of them and ``equal_pairs``, bit for bit;
        ``first_step_min`` and ``first_step_median``, over the pairs whose losses ever differ, of the first step at
        which they do; and where weights were kept, of ``compared`` replicates against the first, the ``largest_ulp`` of
        any element, and the medians of the L2 ``distance`` and the ``cosine``.
        """
        return self._once(kept.equality)

    def classes(self) -> pd.DataFrame:
        """How far the accuracy on each class moves: one row a cell and class, in percent.

        Columns: what the cell is; ``n``; ``class``, its test ``examples``, its ``accuracy`` and ``sd`` over replicates;
        and, the same in all rows of a cell, the ``mean_sd`` and ``largest_sd`` over classes; all with intervals.
        """
        return self._once(examples.classes)

    def floors(self) -> pd.DataFrame:
        """What to expect of errors that are independent: one row a cell, in percent.

        Columns: what the cell is; ``n``; the measured ``disagreement``, the ``least`` that the accuracies allow, and
        what it would be if two models erred independently of each other, on any wrong class alike (``independent``) or
        on wrong classes as often as they are really confused (``independent_by_class``); the ``accuracy_sd`` and its
        floor if examples were won and lost independently of each other; all with intervals; ``notes``.
        """
        return self._once(examples.floors)

    def variances(self) -> pd.DataFrame:
        """The SD of accuracy on this test set and beyond it (Jordan 2024): one row a cell, in percent.

        Columns: what the cell is; ``n``, ``examples``; ``test_set_sd``, ``floor_sd`` and ``distribution_sd`` with
        intervals, see :mod:`orchestrator.analysis.variances`; ``notes``.
        """
        return self._once(examples.apart)

    def overheads(self) -> pd.DataFrame:
        """What determinism costs: one row a network, device and kind of time, where runs held and released the library.

        Columns: ``trainer, architecture, dataset, recipe, device, time``; ``n_held, n_released`` uninterrupted runs,
        the medians ``held, released`` in seconds, and their ``ratio`` with its interval; ``notes``.
        """
        return self._once(across.overheads)

    def bases(self) -> pd.DataFrame:
        """What hangs on the base seed: one row a measure and cell that several base seeds repeat.

        Columns: what the cell is; ``measure``; ``bases``, ``n`` replicates in all; the ``mean`` over base seeds with
        its interval and the SD between them (``sd_between``), in the unit of :meth:`table`; and for ``accuracy_mean``
        the SDs ``within`` and ``between`` base seeds that make up the replicates' accuracies, with intervals;
        ``notes``.
        """
        return self._once(across.bases)

    def divergence(self) -> pd.DataFrame:
        """How far a change of a few bits leads, by the step at which it is made: one row a cell of the onebit source.

        Columns: what the cell is; ``n``; ``step``, steps trained before the change; the median first step whose loss
        differs; against the unchanged run, means over replicates with intervals: L2 ``distance`` and ``cosine`` of the
        final weights, ``predictions_changed`` and ``weights_changed`` in percent, and the barrier on the straight line
        between the two, ``barrier_error`` in percentage points and ``barrier_loss``; ``notes``.
        """
        return self._once(across.divergence)

    def looks(self) -> pd.DataFrame:
        """The looks of an adaptive protocol: one row a cell and look.

        Columns: what the cell is; the number of the ``look`` out of ``looks``; ``replicates`` by then, those of them
        that were ok (``n``), ``diverged`` and ``absent`` (failed for good); the ``accuracy_sd`` in percent that was
        found, with its interval of that ``level``; the declared ``width``; the ``decision`` (``narrow``, ``goes on``,
        ``at most``, ``budget``); ``notes``: why there is no interval.
        """
        return self._once(stopping.looks)

    @property
    def margin(self) -> float:
        """Two measures whose ratio lies within 1/margin to margin count as alike."""
        return self.protocol.margin if self.protocol else Protocol.margin

    def labels(self, cell: Cell) -> NDArray[np.int64] | None:
        """The labels (examples,) that a cell's finished replicates were tested on; None if they differ or are lost."""
        tested = cell.ok["labels_fingerprint"].unique()
        return self.store.labels(tested[0]) if len(tested) == 1 else None

    def _once(self, build: Callable[[Sweep], pd.DataFrame]) -> pd.DataFrame:
        if build not in self._tables:
            self._tables[build] = build(self)
        return self._tables[build].copy()

    def _measure(self, cell: Cell) -> Measured:
        ok = cell.ok
        logits = dict(self.store.logits(list(ok["id"])))
        return measure(
            ok["accuracy"].to_numpy(np.float64),
            ok["cross_entropy"].to_numpy(np.float64),
            self.arrays(ok["id"], "predictions"),
            [logits.get(id) for id in ok["id"]],
            self.labels(cell),
            self.stopping.level(cell),
        )

    def arrays(self, ids: Sequence[str] | pd.Series, name: str) -> list[NDArray[Any] | None]:
        """One list column of some records as arrays, in the order of ``ids``; None where a record has none."""
        table = self.store.table(["id", name], list(ids))
        found = dict(zip(table["id"].to_pylist(), table[name], strict=True))
        return [found[id].values.to_numpy() if id in found and found[id].is_valid else None for id in ids]
