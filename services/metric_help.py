"""What each number of a worker means: the help texts of its metrics."""

from __future__ import annotations

from typing import Final

HELP: Final[dict[str, str]] = {
    # requests
    "requests_running": "Requests in the running batch.",
    "requests_waiting": "Requests that wait for room or for inputs.",
    "requests_outstanding": "Requests that have not ended, by this worker's own books.",
    "requests_outstanding_tokens": "Tokens of these requests at most, prompts and outputs together.",
    "draining": "1 while this worker finishes what it has before it leaves, else 0.",
    "requests_total": "Requests taken.",
    "requests_failed_total": "Requests that ended with an error.",
    "preemptions_total": "Requests that gave up their KV blocks for others, to go on later.",
    "preemptions_by_swap_total": "Those of them whose KV blocks were kept in host memory.",
    # steps and tokens
    "steps_total": "Forward passes of the decoder.",
    "steps_ahead_total": "Those of them launched before the tokens of the one before were known.",
    "surplus_tokens_total": "Tokens computed for sequences that had ended by then: what running ahead costs.",
    "last_step_tokens": "Tokens in the last forward pass, prefill and decode together.",
    "prompt_tokens_total": "Prompt tokens of requests that have begun to generate, media included.",
    "generated_tokens_total": "Tokens generated.",
    "recomputed_tokens_total": "Tokens computed again after a preemption.",
    # KV cache
    "kv_blocks_usable": "KV blocks in the pool.",
    "kv_blocks_free": "KV blocks that can be handed out, those of cached content included.",
    "kv_blocks_used": "KV blocks that requests hold.",
    "kv_blocks_cached": "KV blocks that nobody holds, kept for their content.",
    "kv_host_blocks_free": "KV blocks that host memory has room for.",
    "kv_block_bytes": "Bytes of one KV block, all layers together.",
    "blocks_swapped_out_total": "KV blocks moved to host memory.",
    "blocks_swapped_in_total": "KV blocks moved back from host memory.",
    "forks_total": "Sequences that began with another one's KV blocks.",
    "block_copies_total": "KV blocks copied because a shared one was to be written to.",
    "prefix_queried_tokens_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_hit_tokens_total": "Prompt tokens found in the prefix cache; over the queried ones: the hit rate.",
    "prefix_evictions_total": "KV blocks of the prefix cache given to something else.",
    "cross_table_hits_total": "Cross-attention tables found by content: nothing was projected again.",
    # inputs
    "inputs_pending": "Inputs offered that wait for room.",
    "inputs_granted": "Inputs with reserved room whose tensors have not come.",
    "inputs_stored_total": "Tensors taken into the encoder cache.",
    "inputs_rejected_total": "Tensors that came too late, for nobody, or corrupt.",
    "inputs_revoked_total": "Inputs whose room was taken back for an older request.",
    "inputs_covered_total": "Inputs that were not asked for, because the KV cache has what they would become.",
    "leases_expired_total": "Grants that ended before their tensor came.",
    "encoder_cache_bytes_capacity": "Budget of the encoder cache.",
    "encoder_cache_bytes_used": "Bytes in the encoder cache, reserved room included.",
    "encoder_cache_bytes_peak": "The most bytes that were ever in the encoder cache.",
    "encoder_cache_references": "References that requests hold to entries of the encoder cache.",
    "encoder_cache_hits_total": "Inputs that were in the encoder cache already.",
    "encoder_cache_evictions_total": "Entries of the encoder cache given up for others.",
    # keys and values, from prefill to decode
    "kv_offers_pending": "Offers of keys and values that wait for room, or for their request.",
    "kv_reserved_requests": "Requests with reserved blocks whose keys and values are on their way.",
    "prefill_handoffs_total": "Requests that began to decode with keys and values from another worker.",
    "prefill_handoff_tokens_total": "Tokens whose keys and values came from another worker.",
    "prefill_handoff_cached_tokens_total": "Tokens of such requests that the prefix cache had: they were not sent.",
    "prefill_handoff_bytes_total": "Bytes of keys and values that came from other workers.",
    "kv_leases_expired_total": "Reservations of blocks that ended before all keys and values came.",
    "kv_parts_rejected_total": "Parts of keys and values that came too late, for nobody, or corrupt.",
    "kv_exported_bytes_total": "Bytes of keys and values gathered for other workers.",
    "prefills_ended_total": "Requests prefilled for other workers.",
    # encoder
    "encoder_queue_items": "Items that wait for the encoder.",
    "encoder_items_open": "Items under way at this encoder.",
    "encoder_items_computing": "Items that wait for the encoder with a grant, or are in it.",
    "encoder_held_bytes": "Bytes of media and preprocessed media of items under way.",
    "encoder_batches_total": "Forward passes of the encoder.",
    "encoder_batch_items_last": "Items in the last encoder batch.",
    "encoder_items_total": "Items encoded.",
    "encoder_failures_total": "Items that the encoder failed at.",
    "encoder_seconds_total": "Seconds spent in the encoder.",
    "encoder_computations": "Items that this process has encoded; 0 on a worker that does not encode.",
    "encoder_fallbacks_total": "Items that this decoder's worker encoded itself because there was no encoder.",
    "inputs_landing": "Inputs with room granted, whose encoder outputs are waited for.",
    "inputs_encoding_here": "Inputs under way from this worker's own encoder to its decoder.",
    "encoder_staging_bytes": "Budget of preprocessed media that wait for a grant or for the encoder.",
    "preprocess_waiting": "Items that wait for memory or for a process to be preprocessed.",
    "preprocess_crashes_total": "Preprocessing processes that died.",
    "handoffs_open": "Handoffs under way from this worker to others.",
    "prefills_open": "Requests that this worker prefills for others.",
    # memory: what was found or decided at start
    "memory_weights_bytes": "Bytes of the weights.",
    "memory_activation_bytes": "Bytes that the largest step takes beside weights and pools.",
    "memory_activation_measured": "1 where that was measured at start, 0 where it was assumed or not needed.",
    "memory_budget_bytes": "Bytes for the largest step and the pools together; 0 where every pool was given.",
    "memory_budget_given": "1 where that budget was given, 0 where it was worked out at start.",
    "kv_cache_bytes": "Bytes of the KV block pool.",
    "kv_cache_given": "1 where that size was given, 0 where it was worked out at start.",
    "encoder_cache_bytes": "Bytes of the encoder cache at most.",
    "encoder_cache_given": "1 where that size was given, 0 where it was worked out at start.",
    "swap_bytes": "Bytes of host memory for swapped KV blocks.",
    "swap_given": "1 where that size was given, 0 where it was worked out at start.",
    "tensors_invalid_total": "Messages on this worker's tensor sockets that were none, or whose senders were dropped.",
    # the process
    "weight_bytes": "Bytes of the weights.",
    "engine_busy_seconds": "How long the engine's present turn has lasted; 0 while it waits.",
    "channel_messages_waiting": "Messages that wait to be sent to other instances.",
    "integrity_failures": "Times that the books of an idle engine did not add up; always 0.",
    # by outcome
    "handoffs": "Handoffs from an encoder, or to a worker with a decoder, by outcome.",
    "prefills": "Requests that this worker prefilled for others, by outcome.",
    "kv_handoffs": "Handoffs of keys and values from this prefill worker, by outcome.",
    "encodes": "Items that this encoder was asked for, by outcome.",
    "tensors_sent": "Tensors sent to other workers, by transport.",
    "dropped_messages": "Messages that were not taken or could not be sent, by reason.",
}
"""By name, without the prefix `triptych_`."""


def help_text(name: str) -> str:
    """The help text of a metric; its name in words where there is none."""
    return HELP.get(name, name.replace("_", " "))
