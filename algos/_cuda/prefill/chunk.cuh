// Shared by the kernels of cuda-chunk: the problem, the division into chunks, the layouts in shared memory and between kernels.
//
// A chunk is 64 tokens of one sequence. Chunk i of sequence n has number cu_seqlens[n] / 64 + n + i: the device finds it
// without a prefix sum, no two chunks have the same, and there are at most num_tokens / 64 + N numbers. Rows past
// the end of a sequence count as tokens with k = q = v = 0 and no decay, which leave the state as it is.
//
// One letter, one meaning, in all files here; the letters are those of pt-chunk's equations. C = 64 (CHUNK), s and t count its
// tokens.
//
//   letter     shape       what
//   N, H, HV               sequences, query/key heads, value heads
//   Q, K, V    [C, 128]    a chunk's rows of q, k, v
//   S          [128, 128]  the state, a row for each column of V (so `rows of V` in comments are rows of S); S' after the chunk
//   G          [C]         G_t = log g_1 + ... + log g_t; in memory of log2
//   beta       [C]
//   A          [C, C]      A_ts = beta_t e^(G_t - G_s) k_t.k_s for s < t, else 0
//   T          [C, C]      (I + A)^-1; stored without the ones on its diagonal, as T - I
//   M          [C, C]      M_ts = scale e^(G_t - G_s) q_t.k_s for s <= t, else 0; pt-chunk's times scale
//   R          [C, 128]    beta (V - e^G K S^T), the right-hand side of (I + A) D = R
//   D          [C, 128]    T R, the chunk's updates of the state; pt-chunk's U - W S^T
//   O          [C, 128]    the outputs
//   Phi, L     [128, 128]  of a segment: S' = S Phi + L (context_parallel.cuh)
//
// Sizes have names: num_tokens of all sequences, HEAD_DIM of q, k and v. In code, g and t are a lane's row and column pair in a
// fragment, lane / 4 and lane % 4 (the PTX ISA's groupID and threadID_in_group); d is the accumulator of a product. A `piece`
// is 16 bytes of a row, the unit of the swizzle and of a lane's copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "tensors.cuh"
#include "dependent_launch.cuh"
#include "gates.cuh"
#include "mma_bf16.cuh"
#include "token.h"

namespace gdn {

using ptx::wait_for_kernel_before;

constexpr int CHUNK = 64;       // tokens
constexpr int SIDE = 16;        // of a block of the CHUNK x CHUNK matrices

struct Plan;                     // tile_scheduler.cuh
struct Prefill : Tensors {
  char* prepared;                // [numbers of chunks, HV] of Prepared
  float* ends;                   // [numbers of segments, HV, 128, 128]; see context_parallel.cuh
  float* transfers;              // the same
  int segment;                   // chunks of a segment; 0: a sequence is one
  int ctas;                      // that share the plan's work tiles
  Plan* plan;                    // work tiles in order of length; see tile_scheduler.cuh
  // On sm_90a, if sequences are split (context_parallel.cuh); else null:
  float* bounds;                 // [HV, numbers of chunks], log2 of a bound of ||Phi|| of a chunk
  int* linked;                   // [numbers of segments, HV]: whether a segment has Phi
  int window;                    // chunks that are looked through for one where the state is forgotten
  int sms;                       // for the transfers of all heads' segments with one number
  __host__ __device__ __forceinline__ int64_t chunk_numbers() const { return num_tokens / CHUNK + N; }
  unsigned long long *tickets, launch;  // inter_chunk_sm90_fused.cuh: the counter of work tiles, and the launch's number in it

  // Sequence n has the tokens from its border to the next. Clamped: wrong values in cu_seqlens cause no access outside. There are
  // fewer than 2^31 tokens. The first and the last border of a dense call are known without a load, so that a single sequence never
  // waits. Those of an engine are loaded: it pads its rows, and what lies outside of the sequences must not enter a state.
  __device__ __forceinline__ int border(int n) const {
    if (!POOL && n == 0) return 0;
    if (!POOL && n == N) return static_cast<int>(num_tokens);
    const int64_t x = ends_at(n);
    return static_cast<int>(x < 0 ? 0 : x < num_tokens ? x : num_tokens);
  }
};

// The part of a chunk that does not depend on the state, computed for all chunks at once (intra_chunk_*.cuh) and used one after
// the other (inter_chunk_*.cuh), in the layout of wgmma and TMA: rows of 128 bytes, their eight pieces of 16 bytes permuted by
// the 128-byte swizzle, aligned to 1024 bytes. Above the diagonal are zeros, except in T's upper right quarter, which holds
// the gates and must not be read as T. T's diagonal of ones is omitted: sums of T R begin with R itself, which is then rounded
// only for the entries below the diagonal.
enum Gate {
  IN,    // e^(G_t): the decay of the state before the chunk, up to token t
  OUT,   // e^(G_C - G_t): the decay of token t's update up to the chunk's end; IN of the last token is e^(G_C)
  BETA,
  SUM,   // G_t itself, of log2: for the maker of M (inter_chunk_sm90.cuh)
  // Only where q and k are normalised here (POOL); OUT then has 1 / |k_t| as a factor:
  IN_TIMES_KEY,    // e^(G_t) / |k_t|
  IN_TIMES_QUERY,  // e^(G_t) / |q_t|, on sm_90a from the maker of M
  SUM_KEY,         // G_t + log2 |k_t|: e^(G_t - G_s) / |k_s| is one exp2 for the maker of M
};
constexpr int IN_K = POOL ? IN_TIMES_KEY : IN, IN_Q = POOL ? IN_TIMES_QUERY : IN;  // with K S^T and with Q S^T
constexpr int GATE_ROWS = POOL ? 32 : 16;                                          // of T's upper right quarter
__host__ __device__ constexpr int in_matrix(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
__host__ __device__ constexpr int gate_at(int which, int token) {
  return in_matrix(token / 4, 4 + which % 4) + (token & 3) * 4 + which / 4 * 16 * 128;  // 16 rows have the same swizzle
}
constexpr int MATRIX = CHUNK * CHUNK * 2;  // bytes
struct Prepared {
  char T[MATRIX];  // T - I, of tokens; and the gates, float
  char M[MATRIX];  // of tokens
  __device__ __forceinline__ const float* gate(int which, int token) const {
    return reinterpret_cast<const float*>(T + gate_at(which, token));  // contiguous up to a multiple of 4 tokens
  }
};
static_assert(sizeof(Prepared) == 16384, "16 KB a chunk and head is the limit");

// A tile of 64 rows of PIECES pieces of 16 bytes: eight rows of a piece are in eight different banks.
template <int PIECES>
__host__ __device__ constexpr int in_tile(int row, int piece) {
  const int turn = PIECES >= 8 ? row & 7 : row / (8 / PIECES) & (PIECES - 1);
  return (row * PIECES + (piece ^ turn)) * 16;
}
constexpr int QK_PIECES = HEAD_DIM * 2 / 16;            // of a row of q or k
constexpr int QK_TILE = CHUNK * HEAD_DIM * 2;           // bytes

// The sequence with number `number`: sequence n has the numbers from cu_seqlens[n] / unit + EACH n on, with EACH = 1 at
// least one. Each warp searches for itself, 32 candidates at a time.
template <int EACH = 1>
__device__ __forceinline__ int sequence_of(const Prefill& p, int number, int unit, int lane) {
  int low = 0, span = p.N;
  while (span > 1) {
    const int stride = (span + 31) / 32, at = lane * stride;
    const bool below = lane == 0 || (at < span && p.border(low + at) / unit + EACH * (low + at) <= number);
    const int last = __popc(__ballot_sync(0xffffffffu, below)) - 1;
    low += last * stride, span = stride < span - last * stride ? stride : span - last * stride;
  }
  return low;
}

// The segment of a sequence and value head whose chunks a CTA goes through: a whole sequence, or segment number blockIdx.z
// (context_parallel.cuh).
struct Segment {
  const Prefill& p;
  int hv, h, n, count;             // value head, head, sequence, how many chunks
  bool opens, last;                // whether it is the first, the last of the sequence's segments
  int slot;                        // its number
  int before;                      // the slot of `ends` that has the state before it; less than 0: state has
  StateOf state;                   // the sequence's
  int chunks_before;               // of the sequence
  int first, tokens, number;       // its first token, how many, the number of its first chunk

  // By all lanes of a warp.
  __device__ __forceinline__ Segment(const Prefill& p_, int hv_) : Segment(p_, hv_, blockIdx.z) {}
  __device__ __forceinline__ Segment(const Prefill& p_, int hv_, int slot_)
      : Segment(p_, hv_, slot_, span_of(p_, p_.segment ? sequence_of(p_, slot_, p_.segment * CHUNK, threadIdx.x % 32) : slot_)) {}
  // Of a sequence whose borders are known.
  struct Span { int n, begin, end; };
  static __device__ __forceinline__ Span span_of(const Prefill& p, int n) { return {n, p.border(n), p.border(n + 1)}; }
  __device__ __forceinline__ Segment(const Prefill& p_, int hv_, int slot_, const Span& span)
      : p(p_), hv(hv_), h(hv_ / (p_.HV / p_.H)), n(span.n), slot(slot_) {
    const int unit = p.segment * CHUNK, begin = span.begin, end = max(span.end, begin);
    const int index = p.segment ? slot - (begin / unit + n) : 0;
    first = begin + index * unit, tokens = end - first;
    number = begin / CHUNK + n + index * p.segment;
    opens = index == 0;
    last = !p.segment || tokens <= unit;
    if (!last) tokens = unit;
    count = (tokens + CHUNK - 1) / CHUNK;
    if (index < 0 || (index > 0 && tokens <= 0)) tokens = -1, count = 0;  // there is no such segment
    before = index > 0 ? slot - 1 : last ? -1 : slot + (end - begin - 1) / unit;  // see gdn_prefill_scan
    state = p.state_of(n), chunks_before = index * p.segment;
  }
  // A whole sequence whose borders are known.
  __device__ __forceinline__ Segment(const Prefill& p_, int hv_, int n_, int first_, int tokens_, StateOf state_)
      : p(p_), hv(hv_), h(hv_ / (p_.HV / p_.H)), n(n_), count((tokens_ + CHUNK - 1) / CHUNK), opens(true), last(true), slot(n_),
        before(-1), state(state_), chunks_before(0), first(first_), tokens(tokens_), number(first_ / CHUNK + n_) {}
  __device__ __forceinline__ bool there() const { return tokens >= 0; }
  // Of this value head, number `i` in an array of states or one of the same layout.
  __device__ __forceinline__ int64_t state_at(int i) const { return (static_cast<int64_t>(i) * p.HV + hv) * HEAD_DIM * HEAD_DIM; }
  // The state before the sequence; where the one before the segment is, and where the one after the last goes.
  __device__ __forceinline__ StateRows original() const { return p.original(state, hv); }
  __device__ __forceinline__ StateRows start() const { return before < 0 ? original() : StateRows(p.ends + state_at(before)); }
  __device__ __forceinline__ NewStateRows end() const { return p.final(state, hv); }
  // Whether a state is to be kept after this chunk, all of whose tokens the sequence has; and where.
  __device__ __forceinline__ bool keeps(int chunk) const {
    return (chunk + 1) * CHUNK <= tokens && !padding() && p.is_checkpoint(chunks_before + chunk + 1);
  }
  __device__ __forceinline__ NewStateRows kept(int chunk) const { return p.checkpoint(n, hv, chunks_before + chunk + 1); }
  __device__ __forceinline__ bool padding() const { return p.padding(state); }
};

// Segment number `number` of those that there are, in the sequences' order; `less`: of each sequence that many are left out. So CTAs with
// work come first: 4x2048 47.6 us instead of 48.4 (ladder, "Cheap launches without work", this kernel alone). Up to 31 sequences in one
// access. By all lanes of a warp.
__device__ __forceinline__ Segment segment_of(const Prefill& p, int hv, int number, int less) {
  const int unit = p.segment * CHUNK, lane = threadIdx.x % 32;
  if (!p.segment || (p.N > 31 && less == 0)) return {p, hv, number};
  if (p.N > 31) {
    // A sequence that begins in unit u of all tokens, and has m segments before its last, ends in unit u + m or later: so units can serve
    // as numbers of segments that are not the last.
    const int n = sequence_of<0>(p, number, unit, lane);
    return {p, hv, number + n, Segment::span_of(p, n)};
  }
  const int begin = p.border(min(lane, p.N)), end = __shfl_sync(0xffffffffu, begin, lane < 31 ? lane + 1 : 31);
  const int own = lane < p.N ? (max(end - begin, 1) - 1) / unit + 1 - less : 0;
  int up_to = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int more = __shfl_sync(0xffffffffu, up_to, lane - (lane < d ? 0 : d));
    if (lane >= d) up_to += more;
  }
  const int n = min(__popc(__ballot_sync(0xffffffffu, lane < p.N && up_to <= number)), p.N - 1);  // else it has too few
  const Segment::Span span = {n, __shfl_sync(0xffffffffu, begin, n), __shfl_sync(0xffffffffu, end, n)};
  const int slot = span.begin / unit + n + number - __shfl_sync(0xffffffffu, up_to - own, n);
  return {p, hv, slot, span};
}

// The accumulators of 8 N columns from 8 j on, from or to a state: rows g and g + 8 after `row`.
template <bool = false, int N>
__device__ __forceinline__ void load_state(float (&S)[N][4], const float* state, int row, int j, int lane) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float* at = state + (row + lane / 4) * HEAD_DIM + 8 * (j + i) + 2 * (lane % 4);
    const float2 x = *reinterpret_cast<const float2*>(at), y = *reinterpret_cast<const float2*>(at + 8 * HEAD_DIM);
    S[i][0] = x.x, S[i][1] = x.y, S[i][2] = y.x, S[i][3] = y.y;
  }
}
template <bool = false, int N>
__device__ __forceinline__ void store_state(float* state, const float (&S)[N][4], int row, int j, int lane) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float* at = state + (row + lane / 4) * HEAD_DIM + 8 * (j + i) + 2 * (lane % 4);
    *reinterpret_cast<float2*>(at) = make_float2(S[i][0], S[i][1]);
    *reinterpret_cast<float2*>(at + 8 * HEAD_DIM) = make_float2(S[i][2], S[i][3]);
  }
}

// The same from the state before a segment: the sequence's, or one of `ends`, which are k-last.
template <bool K_FIRST, int N>
__device__ __forceinline__ void load_start(float (&S)[N][4], const Segment& at, int row, int j, int lane) {
  if constexpr (K_FIRST) {
    if (at.before < 0) load_state<true>(S, at.original(), row, j, lane);
    else load_state(S, at.p.ends + at.state_at(at.before), row, j, lane);
  } else {
    load_state(S, at.start(), row, j, lane);
  }
}

// An 8 x 8 matrix of 16-bit numbers, of which a lane has row g at columns 2t and 2t + 1, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Two floats as tokens: a register of a fragment.
__device__ __forceinline__ uint32_t pack(float x, float y) { return token_pair<Token>(x, y); }

// Two accumulators of eight columns each as a left operand of 16 columns.
__device__ __forceinline__ void as_left(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = pack(low[0], low[1]), a[1] = pack(low[2], low[3]);
  a[2] = pack(high[0], high[1]), a[3] = pack(high[2], high[3]);
}

// sum + the squares of eight tokens.
__device__ __forceinline__ float add_squares(float sum, const uint4& words) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = token_of<Token>(w[i], 0), high = token_of<Token>(w[i], 1);
    sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
  }
  return sum;
}

// x = high + low, both bf16, up to an error of 2^-17 of x.
struct Parts { uint32_t high, low; };
__device__ __forceinline__ Parts parts(float x, float y) {
  using Part = __nv_bfloat16;
  const uint32_t high = token_pair<Part>(x, y);
  return {high, token_pair<Part>(x - token_of<Part>(high, 0), y - token_of<Part>(high, 1))};
}

__device__ __forceinline__ void left_parts(uint32_t (&high)[4], uint32_t (&low)[4], const float (&x)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Parts p = parts(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
    high[i] = p.high, low[i] = p.low;
  }
}

// Rows of 128 elements into a tile: row r of `from` + r * stride elements, zeros from row `count` on.
template <int PIECES>
__device__ __forceinline__ void copy_tile(uint32_t to, const Token* from, int64_t stride, int count, int thread,
                                          int threads) {
#pragma unroll 1
  for (int i = thread; i < CHUNK * PIECES; i += threads) {
    const int row = i / PIECES, piece = i % PIECES;
    copy16(to + in_tile<PIECES>(row, piece), from + row * stride + piece * 8, row < count);
  }
}

}  // namespace gdn
