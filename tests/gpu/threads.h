// CUDA source on a CPU: the threads of a block take turns, and meet at barriers.
//
// A thread runs until a barrier or a product of its warp, and gives way to the next. Blocks run one
// after the other. A block whose threads do not all meet at the same barriers ends with an error.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

using uchar = unsigned char;
using uint = unsigned;
using half = _Float16;

struct alignas(8) uint2 {
  uint x, y;
};
struct alignas(16) uint4 {
  uint x, y, z, w;
};
struct dim {
  int x;
};

namespace machine {

struct Operands {
  float* sums;
  const uint* left;
  const uint* right;
};

inline dim block, thread;
inline std::vector<ucontext_t> threads;
inline std::vector<Operands> operands;
inline ucontext_t scheduler;
inline std::vector<int> met;

inline void meet() {
  int self = thread.x;
  ++met[self];
  swapcontext(&threads[self], &scheduler);
  thread.x = self;
}

// Products of fragments of 16 rows and 8 columns, whose words hold numbers of these types.
template <typename Left, typename Right, typename Sum>
void multiply(Sum* sums, const uint* left, const uint* right) {
  constexpr int packed = 4 / sizeof(Left);
  int self = thread.x, lane = self % 32, warp = self - lane;
  operands[self] = {nullptr, left, right};
  meet();
  for (int part = 0; part < 4; ++part) {
    int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
    for (int word = 0; word < 8; ++word) {
      Left a[packed];
      Right b[packed];
      int other = row % 8 * 4 + word % 4;
      std::memcpy(a, &operands[warp + other].left[row / 8 + word / 4 * 2], 4);
      std::memcpy(b, &operands[warp + column * 4 + word % 4].right[word / 4], 4);
      for (int i = 0; i < packed; ++i) sums[part] += Sum(a[i]) * Sum(b[i]);
    }
  }
  meet();
}

// Four fragments of eight rows of four words; every lane says where one row is.
inline void load_fragments(uint* words, const uint* row) {
  int self = thread.x, lane = self % 32, warp = self - lane;
  operands[self] = {nullptr, row, nullptr};
  meet();
  for (int part = 0; part < 4; ++part)
    words[part] = operands[warp + part * 8 + lane / 4].left[lane % 4];
  meet();
}

// The same of eight rows of eight elements of 16 bits; a lane gets two rows of a column.
inline void load_transposed_fragments(uint* words, const uint* row) {
  int self = thread.x, lane = self % 32, warp = self - lane;
  operands[self] = {nullptr, row, nullptr};
  meet();
  for (int part = 0; part < 4; ++part) {
    uint word = 0;
    for (int i = 0; i < 2; ++i) {
      uint16_t element;
      const uint* other = operands[warp + part * 8 + lane % 4 * 2 + i].left;
      std::memcpy(&element, reinterpret_cast<const char*>(other) + lane / 4 * 2, 2);
      word |= uint(element) << 16 * i;
    }
    words[part] = word;
  }
  meet();
}

inline void pack(uint& word, float first, float second) {
  half pair[2] = {half(first), half(second)};
  std::memcpy(&word, pair, 4);
}

// What another lane of the warp has.
inline float exchange(float value, int turn) {
  int self = thread.x;
  operands[self] = {&value, nullptr, nullptr};
  meet();
  float found = *operands[self ^ turn].sums;
  meet();
  return found;
}

// Runs a block; gives 0 if all threads met at all barriers.
inline int run_block(int count, void (*kernel)(void)) {
  constexpr size_t stack = 256 * 1024;
  std::unique_ptr<char[]> memory(new char[count * stack]);
  threads.assign(count, {});
  operands.assign(count, {});
  met.assign(count, 0);
  std::vector<ucontext_t> ends(count);
  std::vector<char> done(count, 0);
  static std::vector<char>* finished;
  static void (*body)(void);
  finished = &done, body = kernel;
  for (int i = 0; i < count; ++i) {
    getcontext(&threads[i]);
    threads[i].uc_stack.ss_sp = memory.get() + i * stack;
    threads[i].uc_stack.ss_size = stack;
    threads[i].uc_link = &scheduler;
    makecontext(&threads[i], +[] {
      body();
      (*finished)[thread.x] = 1;
    }, 0);
  }
  for (int left = count; left;) {
    for (int i = 0; i < count; ++i) {
      if (done[i]) continue;
      thread.x = i;
      swapcontext(&scheduler, &threads[i]);
      left -= done[i];
    }
    for (int i = 0; i < count; ++i)
      if (met[i] != met[0] || done[i] != done[0]) return 1;
  }
  return 0;
}

}  // namespace machine

#define CUDART_INF_F INFINITY
#define threadIdx machine::thread
#define blockIdx machine::block
#define __syncthreads machine::meet

inline float __shfl_xor_sync(uint, float value, int turn) { return machine::exchange(value, turn); }

inline uint __float_as_uint(float value) {
  uint bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline uint __byte_perm(uint first, uint second, uint parts) {
  uint64_t bytes = first | uint64_t(second) << 32;
  uint result = 0;
  for (int i = 0; i < 4; ++i) result |= uint(bytes >> (parts >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

inline half __float2half_rn(float value) { return half(value); }
inline half max(half a, half b) { return a > b ? a : b; }
inline float max(float a, float b) { return a > b ? a : b; }
inline float min(float a, float b) { return a < b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

// Round to the 10 bits behind the point that tf32 has, halves away from zero.
inline void round_to_tf32(uint& bits) { bits = (bits + 0x1000) & ~0x1fffu; }
