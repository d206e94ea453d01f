"""The columns of a result table: what each measure is called, its unit, and what to read from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One measure as it is shown."""

    name: str
    """The column of :meth:`orchestrator.analysis.Sweep.table`."""
    title: str
    short: str
    """The title where space is scarce."""
    summary: str
    scale: float = 1.0
    """What a share is multiplied by: 100 where the papers use percent."""
    bounds: tuple[float, float] = (-1.0, 1.0)
    """The least and the greatest possible value of a measure of pairs, before scaling."""

    @property
    def unit(self) -> str:
        """``%``, or empty."""
        return "%" if self.scale == 100 else ""


QUANTITIES: dict[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        Quantity(
            name="accuracy_mean",
            title="Test accuracy",
            short="accuracy",
            summary="Mean over replicates of the share of test examples classified correctly.",
            scale=100,
        ),
        Quantity(
            name="accuracy_sd",
            title="Accuracy SD",
            short="acc. SD",
            summary="Standard deviation of the test accuracy over replicates, in percentage points.",
            scale=100,
        ),
        Quantity(
            name="cross_entropy_sd",
            title="Cross-entropy SD",
            short="CE SD",
            summary="Standard deviation of the test cross-entropy over replicates, in nats.",
        ),
        Quantity(
            name="perplexity_sd",
            title="Perplexity SD",
            short="perpl. SD",
            summary="Standard deviation over replicates of the test perplexity, the exponential of the cross-entropy.",
        ),
        Quantity(
            name="disagreement",
            title="Disagreement",
            short="disagree",
            summary="Share of test examples on which two replicates predict different classes, mean over pairs; "
            "also called churn.",
            scale=100,
            bounds=(0.0, 1.0),
        ),
        Quantity(
            name="correlation",
            title="Correlation",
            short="corr.",
            summary="Spearman's rank correlation of two replicates' test logits, mean over pairs.",
        ),
        Quantity(
            name="pearson",
            title="Pearson correlation",
            short="Pearson",
            summary="Pearson's correlation of two replicates' test logits, mean over pairs.",
        ),
        Quantity(
            name="ensemble_gain",
            title="Ensemble gain",
            short="gain",
            summary="Accuracy of two replicates' averaged logits minus that of one of them, "
            "mean over pairs and both members, in percentage points.",
            scale=100,
        ),
    )
}
