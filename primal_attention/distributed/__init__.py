"""Context parallelism: the tokens of a sequence sharded over processes."""

from primal_attention.distributed.collectives import Message, count_messages
from primal_attention.distributed.context import context_inputs, join_tokens, shard_context

__all__ = ["Message", "context_inputs", "count_messages", "join_tokens", "shard_context"]
