"""CUDA functions for products on tensor cores, each as its name and its source.

Memory is counted in words of 32 bits: one float32 number, or two neighbors in depth of a type of 16
bits, or four of one of 8 bits. The kernels of :mod:`.fragment_kernel` call these functions with
pointers, so that TVM puts in no barriers of its own. A place in a kernel's own memory is a buffer
and an index, so that TVM sees all of the buffer in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call

_VECTORS = {1: "unsigned", 2: "uint2", 4: "uint4"}

_SHAPES = {
    "float16": "m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "float32": "m16n8k8.row.col.f32.tf32.tf32.f32",
    "int8_int8": "m16n8k32.row.col.s32.s8.s8.s32",
    "int8_uint8": "m16n8k32.row.col.s32.s8.u8.s32",
    "uint8_int8": "m16n8k32.row.col.s32.u8.s8.s32",
    "uint8_uint8": "m16n8k32.row.col.s32.u8.u8.s32",
}
"""The instruction for each type of the factors; float32 is rounded to tf32. Types of 8 bits come in
all pairs."""


@dataclass(frozen=True)
class Function:
    """A function of the device.

    Attributes:
        name: What it is called by.
        source: Its definition.
        result: Type of what it returns.
    """

    name: str
    source: str
    result: str = "void"

    def __call__(self, *arguments: Any) -> Any:
        """A call as an expression."""
        return cuda_func_call(
            self.name, *arguments, source_code=self.source, return_type=self.result
        )

    def run(self, *arguments: Any) -> Any:
        """A call as a statement."""
        return tirx.Evaluate(self(*arguments))


def fetch_words(words: int) -> Function:
    """``(to, at, from, index, when)``: move 1, 2 or 4 words of aligned memory into registers.

    A load is one instruction, also where it has a condition, so that many are on their way at once;
    without the condition zeros are moved.
    """
    name = f"hybridc_fetch_{words}"
    outputs = ", ".join(f'"=r"(to[at + {index}])' for index in range(words))
    clear = " ".join(f"mov.b32 %{index}, 0;" for index in range(words))
    registers = ", ".join(f"%{index}" for index in range(words))
    target = registers if words == 1 else "{" + registers + "}"
    vector = "" if words == 1 else f".v{words}"
    body = f"""
template <typename Element>
__device__ __forceinline__ void {name}(
    unsigned* to, int at, const Element* from, long long index, int when) {{
#ifdef __CUDA_ARCH__
  asm volatile("{{.reg .pred p; setp.ne.s32 p, %{words + 1}, 0; {clear} "
               "@p ld.global.nc{vector}.b32 {target}, [%{words}];}}"
               : {outputs} : "l"(from + index), "r"(when));
#else
  __builtin_memset(to + at, 0, {4 * words});
  if (when) __builtin_memcpy(to + at, from + index, {4 * words});
#endif
}}
"""
    return Function(name, body)


def fetch_pair() -> Function:
    """``(to, at, from, first, is_first, second, is_second)``: two elements of 16 bits as a word."""
    name = "hybridc_fetch_pair"
    load = "setp.ne.s32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1];"
    body = f"""
template <typename Element>
__device__ __forceinline__ void {name}(
    unsigned* to, int at, const Element* from,
    long long first, int is_first, long long second, int is_second) {{
  unsigned short low = 0, high = 0;
#ifdef __CUDA_ARCH__
  asm volatile("{{.reg .pred p; {load}}}" : "=h"(low) : "l"(from + first), "r"(is_first));
  asm volatile("{{.reg .pred p; {load}}}" : "=h"(high) : "l"(from + second), "r"(is_second));
#else
  if (is_first) __builtin_memcpy(&low, from + first, 2);
  if (is_second) __builtin_memcpy(&high, from + second, 2);
#endif
  to[at] = low | static_cast<unsigned>(high) << 16;
}}
"""
    return Function(name, body)


def write_words(words: int) -> Function:
    """``(to, from)``: move results, so many words, from registers to aligned memory."""
    name = f"hybridc_write_{words}"
    body = f"""
__device__ __forceinline__ void {name}(void* to, const void* from) {{
  {_VECTORS[words]} value;
  __builtin_memcpy(&value, from, sizeof(value));
  *reinterpret_cast<{_VECTORS[words]}*>(to) = value;
}}
"""
    return Function(name, body)


def pack_word(dtype: str) -> Function:
    """Elements that are neighbors in depth as one word: ``(first, second)``, or ``(only)``."""
    if dtype == "float32":
        body = """
__device__ __forceinline__ unsigned hybridc_word_float32(float value) {
  return __float_as_uint(value);
}
"""
        return Function("hybridc_word_float32", body, "uint32")
    name = f"hybridc_word_{dtype}"
    element = {"float16": "half", "bfloat16": "nv_bfloat16"}[dtype]
    body = f"""
__device__ __forceinline__ unsigned {name}({element} first, {element} second) {{
  unsigned short low, high;
  __builtin_memcpy(&low, &first, 2);
  __builtin_memcpy(&high, &second, 2);
  return low | static_cast<unsigned>(high) << 16;
}}
"""
    return Function(name, body, "uint32")


def store_row(dtype: str, words: int) -> Function:
    """``(to, at, from, first)``: move words that are neighbors in depth to shared memory."""
    name = f"hybridc_store_row_{dtype}_{words}"
    return Function(
        name,
        _store(name, dtype, words, [f"from[first + {index}]" for index in range(words)], "first"),
    )


def store_columns(dtype: str) -> Function:
    """``(to, at, from, first, second)``: move two columns of a row of words to shared memory.

    For types of 16 bits, what comes in are two columns at one depth, and two at the next.
    """
    name = f"hybridc_store_columns_{dtype}"
    words = ["from[first]", "from[second]"]
    if dtype != "float32":
        words = [f"__byte_perm({', '.join(words)}, {parts})" for parts in ("0x5410", "0x7632")]
    return Function(name, _store(name, dtype, 2, words, "first", "second"))


def _store(name: str, dtype: str, count: int, words: list[str], *sources: str) -> str:
    parameters = ", ".join(f"int {source}" for source in sources)
    lines = [f"  unsigned words[{count}] = {{{', '.join(words)}}};"]
    if dtype == "float32":
        lines.append(
            f"  for (int i = 0; i < {count}; ++i)\n"
            '    asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(words[i]));'
        )
    vector = _VECTORS[count]
    lines += [
        f"  {vector} value;",
        "  __builtin_memcpy(&value, words, sizeof(value));",
        f"  *reinterpret_cast<{vector}*>(to + at) = value;",
    ]
    return (
        f"\n__device__ __forceinline__ void {name}(\n"
        f"    unsigned* to, int at, const unsigned* from, {parameters}) {{\n"
        + "\n".join(lines)
        + "\n}\n"
    )


def multiply(
    dtype: str, rows: int, words: int, left: tuple[int, int], right: tuple[int, int]
) -> Function:
    """``(sums, tiles, left, right, lane)``: add a warp's products of one step to its sums.

    Fragments of 16 rows and of 8 columns are multiplied, of which a warp has ``rows`` and 4. A lane
    holds the words of rows ``lane / 4`` and 8 more, and of depths ``lane % 4`` and 4 more.

    Args:
        dtype: Type of the factors.
        rows: Fragments of rows.
        words: Depth of the step.
        left: Words from one row of the left factor to the next, and from one depth to the next.
        right: The same for columns of the right factor.
    """
    name = f"hybridc_multiply_{dtype}_{rows}_{words}_{left[0]}_{left[1]}_{right[0]}_{right[1]}"
    body = f"""
__device__ __forceinline__ void {name}(
    float* sums, const unsigned* tiles, int left_at, int right_at, int lane) {{
  const unsigned* left = tiles + left_at;
  const unsigned* right = tiles + right_at;
  left += (lane / 4) * {left[0]} + (lane % 4) * {left[1]};
  right += (lane / 4) * {right[0]} + (lane % 4) * {right[1]};
#pragma unroll
  for (int depth = 0; depth < {words}; depth += 8) {{
    unsigned a[{rows}][4], b[4][2];
#pragma unroll
    for (int row = 0; row < {rows}; ++row)
#pragma unroll
      for (int part = 0; part < 4; ++part)
        a[row][part] = left[(row * 16 + part % 2 * 8) * {left[0]}
                            + (depth + part / 2 * 4) * {left[1]}];
#pragma unroll
    for (int column = 0; column < 4; ++column)
#pragma unroll
      for (int part = 0; part < 2; ++part)
        b[column][part] = right[column * 8 * {right[0]} + (depth + part * 4) * {right[1]}];
#pragma unroll
    for (int row = 0; row < {rows}; ++row)
#pragma unroll
      for (int column = 0; column < 4; ++column) {{
        float* c = sums + (row * 4 + column) * 4;
        {multiply_fragments(dtype, " volatile", ("b[column][0]", "b[column][1]"))}
      }}
  }}
}}
"""
    return Function(name, body)


def copy_chunk() -> Function:
    """``(to, at, chunk, turn, from, index, when)``: begin to copy 16 aligned bytes.

    They go to chunk ``chunk xor turn`` of shared memory behind ``at``. Without the condition zeros
    are copied.
    """
    body = """
template <typename Element>
__device__ __forceinline__ void hybridc_copy_chunk(
    unsigned* to, int at, int chunk, int turn, const Element* from, long long index, int when) {
  to += at + (chunk ^ turn) * 4;
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
                  "l"(from + index), "r"(when ? 16 : 0) : "memory");
#else
  __builtin_memset(to, 0, 16);
  if (when) __builtin_memcpy(to, from + index, 16);
#endif
}
"""
    return Function("hybridc_copy_chunk", body)


def end_copies() -> Function:
    """``()``: what was begun to be copied since the last call becomes one group."""
    body = """
__device__ __forceinline__ void hybridc_end_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
"""
    return Function("hybridc_end_copies", body)


def await_copies(left: int) -> Function:
    """``()``: wait until no more than so many groups are on their way."""
    body = f"""
__device__ __forceinline__ void hybridc_await_copies_{left}() {{
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group {left};" ::: "memory");
#endif
}}
"""
    return Function(f"hybridc_await_copies_{left}", body)


def turns_of(words: int) -> tuple[int, int]:
    """How the chunks of 16 bytes of rows of so many words are swapped.

    Row r swaps its chunks by ``r / first % second``, so that chunks at one depth of eight rows lie
    in all banks.
    """
    chunks = words // 4
    turns = min(chunks & -chunks, 8)
    return 8 // turns, turns


def multiply_chunks(dtype: str, rows: int, columns: int, words: int) -> Function:
    """``(sums, tiles, left, right, lane)``: add a warp's products of one step to its sums.

    As :func:`multiply`, for tiles as :mod:`.fragment_copies` keeps them, eight rows of which are
    read at once by ``ldmatrix``.

    Args:
        dtype: Type of the factors, or both types, such as ``uint8_int8``.
        rows: Fragments of 16 rows.
        columns: Fragments of 8 columns, an even number.
        words: Depth of the step.
    """
    divisor, turns = turns_of(words)
    sum_type = "int" if "int8" in dtype else "float"
    name = f"hybridc_multiply_chunks_{dtype}_{rows}_{columns}_{words}"
    depth = "((depth + {}) ^ turn)"
    first = f"left + row * {16 * words} + {depth.format('lane / 16 * 4')}"
    second = f"right + pair * {16 * words} + {depth.format('lane / 8 % 2 * 4')}"
    right = ("b[column / 2][column % 2 * 2]", "b[column / 2][column % 2 * 2 + 1]")
    body = f"""
__device__ __forceinline__ void {name}(
    {sum_type}* sums, const unsigned* tiles, int left_at, int right_at, int lane) {{
  const int turn = lane % 8 / {divisor} % {turns} * 4;
  const unsigned* left = tiles + left_at + lane % 16 * {words};
  const unsigned* right = tiles + right_at + (lane / 16 * 8 + lane % 8) * {words};
#pragma unroll
  for (int depth = 0; depth < {words}; depth += 8) {{
    unsigned a[{rows}][4], b[{columns // 2}][4];
#pragma unroll
    for (int row = 0; row < {rows}; ++row) {{
      {load_fragments("a[row]", first)}
{rounded("a[row]", dtype, 4)}
    }}
#pragma unroll
    for (int pair = 0; pair < {columns // 2}; ++pair) {{
      {load_fragments("b[pair]", second)}
{rounded("b[pair]", dtype, 4)}
    }}
#pragma unroll
    for (int row = 0; row < {rows}; ++row)
#pragma unroll
      for (int column = 0; column < {columns}; ++column) {{
        {sum_type}* c = sums + (row * {columns} + column) * 4;
        {multiply_fragments(dtype, "", right)}
      }}
  }}
}}
"""
    return Function(name, body)


def multiply_fragments(dtype: str, volatile: str, right: tuple[str, str]) -> str:
    """Statement that adds the product of fragments ``a[row]`` and ``right`` to ``c``."""
    c = ", ".join(f'"+{"r" if "int8" in dtype else "f"}"(c[{i}])' for i in range(4))
    return f"""asm{volatile}("mma.sync.aligned.{_SHAPES[dtype]} "
            "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
            : {c}
            : "r"(a[row][0]), "r"(a[row][1]), "r"(a[row][2]), "r"(a[row][3]),
              "r"({right[0]}), "r"({right[1]}));"""


def load_fragments(to: str, source: str, transposed: bool = False) -> str:
    """Statement that loads four fragments of eight rows and four words into four registers.

    Args:
        to: An array of four words.
        source: A pointer: lane ``8 i + r`` gives row r of fragment i.
        transposed: Whether a lane gets two rows of a column of elements of 16 bits, and not two
            columns of a row.
    """
    outputs = ", ".join(f'"=r"({to}[{index}])' for index in range(4))
    turned = ".trans" if transposed else ""
    return f"""asm volatile(
          "ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
          : {outputs}
          : "r"(static_cast<unsigned>(__cvta_generic_to_shared({source}))) : "memory");"""


def rounded(words: str, dtype: str, count: int) -> str:
    """Statements that round so many words to tf32, where they are float32."""
    if dtype != "float32":
        return ""
    lines = (f'asm("cvt.rna.tf32.f32 %0, %0;" : "+r"({words}[{i}]));' for i in range(count))
    return "\n".join(f"      {line}" for line in lines)
