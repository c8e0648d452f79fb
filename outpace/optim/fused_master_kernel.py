"""The Triton kernel of `fused_master`; importing it loads Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _load_pointer(table, place, dtype):
    """Return entry `place` of a table of addresses, all multiples of 16, as a pointer."""
    return tl.multiple_of(tl.load(table + place).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _update_block(
    gradient, weight, master, exp_avg, exp_avg_sq, places, inside, factor, step_size,
    correction2_root, decay, beta1, rest1, beta2, rest2, eps, MASKED: tl.constexpr,
):  # fmt: skip
    """Apply AdamW to one block of a tensor; if MASKED, only to the elements that `inside` marks."""
    mask = inside if MASKED else None
    g = tl.load(gradient + places, mask=mask).to(tl.float32) * factor
    p = tl.load(master + places, mask=mask)
    m = tl.load(exp_avg + places, mask=mask)
    v = tl.load(exp_avg_sq + places, mask=mask)
    p -= decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= step_size * m / (tl.sqrt(v) / correction2_root + eps)
    tl.store(master + places, p, mask=mask)
    tl.store(exp_avg + places, m, mask=mask)
    tl.store(exp_avg_sq + places, v, mask=mask)
    tl.store(weight + places, p.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def step_kernel(
    gradient_table, fixed_table, sizes, owners, starts, factor_at, tensors, lr, decay,
    beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps,
    HAS_FACTOR: tl.constexpr, GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor in each program. See `fused_master._Table` for the tables.

    1 − βⁿ is computed in fp64: in fp32, rounding 0.999 would change 1 − 0.999 by more than 1e-5 of
    its value. `rest1` and `rest2` are 1 − β, rounded once.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    start = tl.load(starts + program)
    size = tl.load(sizes + owner)
    gradient = _load_pointer(gradient_table, owner, GRADIENT)
    weight = _load_pointer(fixed_table, owner, WEIGHT)
    master = _load_pointer(fixed_table, tensors + owner, tl.float32)
    exp_avg = _load_pointer(fixed_table, 2 * tensors + owner, tl.float32)
    exp_avg_sq = _load_pointer(fixed_table, 3 * tensors + owner, tl.float32)
    step_at = tl.load(fixed_table + 4 * tensors + owner).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at).to(tl.float64) + 1
    step_size = (lr / (1 - tl.exp(step * log_beta1))).to(tl.float32)
    correction2_root = tl.sqrt(1 - tl.exp(step * log_beta2)).to(tl.float32)
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(factor_at)
    places = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _update_block(gradient, weight, master, exp_avg, exp_avg_sq, places, places, factor,
                      step_size, correction2_root, decay, beta1, rest1, beta2, rest2, eps,
                      False)  # fmt: skip
    else:
        inside = places < size
        _update_block(gradient, weight, master, exp_avg, exp_avg_sq, places, inside, factor,
                      step_size, correction2_root, decay, beta1, rest1, beta2, rest2, eps,
                      True)  # fmt: skip
