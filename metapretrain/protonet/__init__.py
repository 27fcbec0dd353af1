"""Prototypes: how labelled examples teach a feature space."""

from metapretrain.gather import gather_rows
from metapretrain.protonet.distances import DISTANCES, proto_logits
from metapretrain.protonet.labels import MODES, check_labels
from metapretrain.protonet.loss import ProtoLoss
from metapretrain.protonet.prototypes import dense_ids, prototypes

__all__ = [
    "DISTANCES",
    "MODES",
    "ProtoLoss",
    "check_labels",
    "dense_ids",
    "gather_rows",
    "proto_logits",
    "prototypes",
]
