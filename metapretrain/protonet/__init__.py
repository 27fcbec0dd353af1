"""Prototypes, distances, the prototypical loss and prototypical networks."""

from metapretrain.distributed import gather_rows
from metapretrain.protonet.loss import MODES, ProtoLoss, check_labels
from metapretrain.protonet.prototypes import DISTANCES, dense_ids, proto_logits, prototypes

__all__ = ["DISTANCES", "MODES", "ProtoLoss", "check_labels", "dense_ids", "gather_rows", "proto_logits", "prototypes"]
