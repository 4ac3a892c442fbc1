"""CUDA functions for attention on tensor cores, beside those of :mod:`.fragment_functions`.

A warp has 16 queries. Its scores and its sums lie as the instruction leaves them: of each fragment
of 8 columns a lane holds columns ``2 (lane % 4)`` and the next, of row ``lane / 4`` and of that 8
further down. What it knows of both rows is the state: the largest score of each, then its own part
of the sum of weights of each.
"""

from __future__ import annotations

from hybridc.targets.gpu.schedules.fragment_functions import (
    Function,
    load_fragments,
    multiply_fragments,
    rounded,
    turns_of,
)

LOG2_E = "1.4426950408889634f"

LOWEST = -3.4028234663852886e38
"""What the largest score is before there is one; finite, so that no difference is not a number."""


def soften(fragments: int, columns: int) -> Function:
    """``(sums, scores, state)``: turn a tile's scores to weights, and the sums to their scale.

    Args:
        fragments: Fragments of scores.
        columns: Fragments of sums.
    """
    name = f"hybridc_soften_{fragments}_{columns}"
    body = f"""
__device__ __forceinline__ void {name}(float* sums, float* scores, float* state) {{
#pragma unroll
  for (int part = 0; part < 2; ++part) {{
    float most = state[part], total = state[2 + part];
#pragma unroll
    for (int i = 0; i < {2 * fragments}; ++i)
      most = fmaxf(most, scores[i / 2 * 4 + part * 2 + i % 2]);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float kept = exp2f((state[part] - most) * {LOG2_E});
    total *= kept;
#pragma unroll
    for (int i = 0; i < {2 * fragments}; ++i) {{
      float* score = scores + i / 2 * 4 + part * 2 + i % 2;
      *score = exp2f((*score - most) * {LOG2_E});
      total += *score;
    }}
#pragma unroll
    for (int i = 0; i < {2 * columns}; ++i) sums[i / 2 * 4 + part * 2 + i % 2] *= kept;
    state[part] = most;
    state[2 + part] = total;
  }}
}}
"""
    return Function(name, body)


def settle() -> Function:
    """``(state)``: sums of weights of the lanes become the reciprocals of the rows' sums."""
    body = """
__device__ __forceinline__ void hybridc_settle(float* state) {
#pragma unroll
  for (int part = 2; part < 4; ++part) {
    float total = state[part];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    state[part] = 1.0f / total;
  }
}
"""
    return Function("hybridc_settle", body)


def weigh(dtype: str, keys: int, columns: int, words: int) -> Function:
    """``(sums, weights, tiles, values, lane)``: add a tile's values, times weights, to the sums.

    The weights of two neighboring keys lie as they are wanted for types of 16 bits. For tf32, a
    lane is to have keys ``lane % 4`` and 4 more; since the order of summands does not matter, it
    takes keys ``2 (lane % 4)`` and the next in their place.

    Args:
        dtype: Type of the values.
        keys: Keys of the tile.
        columns: Fragments of 8 columns, an even number for types of 16 bits.
        words: Words of a row of values, which are kept as :mod:`.fragment_copies` says.
    """
    name = f"hybridc_weigh_{dtype}_{keys}_{columns}_{words}"
    write = _weigh_words if dtype == "float32" else _weigh_pairs
    body = f"""
__device__ __forceinline__ void {name}(
    float* sums, const float* weights, const unsigned* tiles, int at, int lane) {{
  const int row = 0;
{write(dtype, keys, columns, words)}
}}
"""
    return Function(name, body)


def _weigh_pairs(dtype: str, keys: int, columns: int, words: int) -> str:
    divisor, turns = turns_of(words)
    address = f"values + step * {16 * words} + ((pair * 8 + lane / 16 * 4) ^ turn)"
    right = ("b[column * 2]", "b[column * 2 + 1]")
    return f"""  const int turn = lane % 8 / {divisor} % {turns} * 4;
  const unsigned* values = tiles + at + lane % 16 * {words};
#pragma unroll
  for (int step = 0; step < {keys // 16}; ++step) {{
    unsigned a[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {{
      const float* pair = weights + (step * 2 + i / 2) * 4 + i % 2 * 2;
      {_pair("a[0][i]", "pair[0]", "pair[1]", dtype)}
    }}
#pragma unroll
    for (int pair = 0; pair < {columns // 2}; ++pair) {{
      unsigned b[4];
      {load_fragments("b", address, transposed=True)}
#pragma unroll
      for (int column = 0; column < 2; ++column) {{
        float* c = sums + (pair * 2 + column) * 4;
        {multiply_fragments(dtype, "", right)}
      }}
    }}
  }}"""


def _pair(to: str, first: str, second: str, dtype: str) -> str:
    """Statement that rounds two numbers to a type of 16 bits, as one word."""
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    return f'asm("cvt.rn.{kind}.f32 %0, %1, %2;" : "=r"({to}) : "f"({second}), "f"({first}));'


def _weigh_words(dtype: str, keys: int, columns: int, words: int) -> str:
    divisor, turns = turns_of(words)
    group = f"((column * 2 + lane / 16) ^ (key % 8 / {divisor} % {turns}))"
    return f"""#pragma unroll
  for (int step = 0; step < {keys // 8}; ++step) {{
    const float* given = weights + step * 4;
    unsigned a[1][4] = {{__float_as_uint(given[0]), __float_as_uint(given[2]),
                        __float_as_uint(given[1]), __float_as_uint(given[3])}};
{rounded("a[0]", dtype, 4)}
#pragma unroll
    for (int column = 0; column < {columns}; ++column) {{
      unsigned b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {{
        const int key = step * 8 + lane % 4 * 2 + i;
        b[i] = tiles[at + key * {words} + {group} * 4 + lane / 4 % 4];
      }}
{rounded("b", dtype, 2)}
      float* c = sums + column * 4;
      {multiply_fragments(dtype, "", ("b[0]", "b[1]"))}
    }}
  }}"""
