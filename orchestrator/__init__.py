"""From a protocol to its records and from its records to a report: planning, launching, the store, the analysis."""
