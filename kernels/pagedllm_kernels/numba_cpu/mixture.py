"""The operations of a mixture of experts, and room for what they read and write.

Owner: numba_cpu. What the operations do is in :mod:`experts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.program import operation

if TYPE_CHECKING:
    from pagedllm_kernels.numba_cpu.decoder import CompiledDecoder
    from pagedllm_kernels.numba_cpu.program import Fields, Job

# Fields of the job from its end: the number of rows in a step; normed states, float32; rows and
# results by expert; the experts chosen, their shares, tokens by place and places by pair; how
# many rows each expert has, and where they start.
_PAIRS, _ROUTED, _ROWS, _RESULTS, _CHOSEN, _SHARES, _ORDER, _PLACES, _COUNTS, _STARTS = range(
    at.JOB_SIZE - 10, at.JOB_SIZE
)


def reserve(job: Job, spec: Any, tokens: int, inner: int, itemsize: int) -> int:
    """Make room for a step's rows; return how many rows are packed, at most.

    Args:
        job: the decoder's.
        spec: has experts.
        tokens: of the step.
        inner: buffer between an expert's two products.
        itemsize: bytes of an activation.
    """
    pairs, width = tokens * spec.experts.top_k, spec.hidden_size
    job.fields[_PAIRS] = pairs
    for buffer, size in (
        (_ROUTED, tokens * width * 4),
        (_ROWS, pairs * width * itemsize),
        (inner, pairs * spec.experts.intermediate_size * itemsize),
        (_RESULTS, pairs * width * 4),
        *((each, pairs * 8) for each in (_CHOSEN, _SHARES, _ORDER, _PLACES)),
        *((each, spec.experts.num * 8) for each in (_COUNTS, _STARTS)),
    ):
        job.reserve(buffer, size)
    return int(pairs + at.LANES * spec.experts.num)


def records(
    decoder: CompiledDecoder, spec: Any, layer: Any, buffers: tuple[int, int, int]
) -> list[list[int]]:
    """Return what sends tokens to their experts and adds the results to the residual stream.

    Args:
        decoder: writes down norms and products.
        spec: of the decoder.
        layer: weights of one whose MLP is sparse.
        buffers: the residual stream, a product that is to be normed, and what lies between an
            expert's two products.
    """
    stream, out, inner = buffers
    experts, width = spec.experts, spec.hidden_size
    routed: Fields = {
        at.R_EXPERTS: experts.num,
        at.R_TOP: experts.top_k,
        at.R_WIDTH: width,
        at.R_IN_AT: _ROUTED,
        at.R_WEIGHT: decoder.floats(layer.router),
        at.R_NORMALIZE: int(experts.normalize),
        at.R_CHOSEN_AT: _CHOSEN,
        at.R_SHARES_AT: _SHARES,
        at.R_ORDER_AT: _ORDER,
        at.R_PLACES_AT: _PLACES,
    }
    owners = {at.M_EXPERTS: experts.num, at.M_COUNTS_AT: _COUNTS, at.M_STARTS_AT: _STARTS}
    wide: Fields = {at.N_MODE: at.STORE_F32, at.N_OUT_STRIDE: width * 4}
    found = decoder.norm(stream, _ROUTED, layer.mlp_norm, width, wide)
    found += [operation(at.ROUTE, routed), operation(at.SORT, {**routed, **owners})]
    gather: Fields = {at.N_ROWS_AT: _PAIRS, at.N_INDEX_AT: _ORDER}
    found += decoder.norm(_ROUTED, _ROWS, None, width, gather)
    for source, weight, target, mode in (
        (_ROWS, layer.gate_up, inner, at.GATED),
        (inner, layer.down, _RESULTS, at.STORE_F32),
    ):
        for record in decoder.linear(source, weight[0], None, target, mode):
            record[at.CODE] += at.EXPERT
            for index, value in owners.items():
                record[index] = value
            record[at.M_BYTES] = weight.stride(0) * weight.itemsize
            found.append(record)
    norm = layer.mlp_out_norm
    ends: Fields = {
        at.R_IN_AT: _RESULTS,
        at.R_OUT_AT: stream if norm is None else out,
        at.R_MODE: at.ADD if norm is None else at.STORE_F32,
        at.R_SCALE: float(spec.residual_scale),
    }
    found.append(operation(at.COMBINE, routed | ends))
    return found + ([] if norm is None else decoder.add_normed(norm))
