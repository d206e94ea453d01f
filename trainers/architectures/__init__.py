"""Architectures, each written once over the operations of :mod:`trainers.operations`."""
