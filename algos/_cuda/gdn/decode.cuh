// The kernel of cuda-v5 and of cuda-v5-packed, for a state of float, __nv_bfloat16 or __half; the arithmetic is float.
//
//   g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)        one pair per (batch, value head)
//   x = S k,  y = S q,  z = k.q                     on the old state S [V, K], k-last, K = V = 128
//   d = beta (v - g x),   o = scale (g y + d z),   S' = g S + d k^T
//
// LANES lanes have one row of S, a warp has 32 / LANES rows at a time and ROWS of these groups in registers, and does that
// PASSES times; a CTA has WARPS warps, all of one head, and registers are limited so that RESIDENT warps fit on an SM. S is
// loaded before anything else and stored once.
//
// Steps, as in docs/kernels/decode-v5.md: 1 load S, 2 load the rest, 3 gates, 4 dots, 5 reduce, 6 update and store.
//
// Differences from the textbook version:
//   - With several passes the first one's rows are loaded to registers, and those of all others by asynchronous copies to
//     shared memory, issued at the same time: bytes are in flight all the time, and one wave of CTAs replaces two and a
//     half. A thread reads back only its own copies, so no barrier is needed. (Loads to registers one pass ahead lost:
//     ptxas moves them after the arithmetic of the previous pass.)
//   - The grid is flat and the state's address depends only on block and thread index: its loads are among the first
//     instructions. Everything else (other pointers, divisions by HV) comes after a branch that is never taken, and ptxas
//     does not move it across: with L2 cold, each missing line of constants or instructions costs as much as a DRAM
//     access, and now overlaps with the state's loads.
//   - Sums over the lanes of several rows are a reduce-scatter: each exchange halves the sums that a lane holds, so 2 ROWS
//     sums cost about 2 ROWS shuffles, not 2 ROWS log2(LANES); d goes back to all lanes by one shuffle per row. A single
//     row, for small batches, is reduced in all lanes at once: more shuffles, but two fewer dependent ones.
//   - RESIDENT = 1, no limit, is for small batches: by default ptxas takes 32 registers, too few to load constants
//     together (40 would do), and B = 1 takes a fifth longer.
//   - exp is ex2.approx, and log1p a polynomial (relative error 3.3e-7 on [0, 1]): expf and log1pf are a fifth of all
//     code. log(1 + x) itself would lose small x, which matter with a large exp(A_log).
// Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464); both dots on the old state as SyFI's contest entry
// describes; division by an invariant after Granlund and Montgomery (PLDI 1994). Written here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "access.cuh"
#include "async_copy.cuh"
#include "gates.cuh"

namespace gdn {

constexpr int K = 128, V = 128;

// In the order of use: the constant cache is cold too, and the first line of 64 bytes has the first six.
template <typename T>
struct Arguments {
  using State = T;
  using Token = __nv_bfloat16;  // of q, k, v and output; of a, b and dt_bias where they have 16 bits
  static constexpr bool POOLED = false, PLAIN = false, GIVEN = false;
  const T* state;            // [B, HV, V, K]
  const __nv_bfloat16* k;    // [B, H, K]
  const __nv_bfloat16* q;    // [B, H, K]
  const __nv_bfloat16* v;    // [B, HV, V]
  const __nv_bfloat16* a;    // [B, HV]
  const __nv_bfloat16* b;    // [B, HV]
  const float* A_log;        // [HV]
  const float* dt_bias;      // [HV]
  T* new_state;              // like state, and may be state itself: a lane reads only elements that it later writes
  __nv_bfloat16* output;     // [B, HV, V]
  float scale;
  uint32_t HV;
  Divisor by_HV, by_group;   // group: value heads of one query/key head
};

// The call of a serving engine: states in the slots of a pool, q, k and v side by side in a row, which q and k leave
// normalised. Rows and slots may be strided; all strides are of elements.
template <typename T>
struct PoolArguments {
  using State = T;
  using Token = __nv_bfloat16;
  static constexpr bool POOLED = true, PLAIN = false, GIVEN = false;
  // What the state's address needs comes first: the constant cache is cold too.
  const void* slots;         // [B] int32 or int64: a row's slot of the pool
  const T* pool;             // [slots, HV, V, K], the state of each head dense
  int64_t slot_stride;
  Divisor by_HV{1};
  uint32_t HV;
  int32_t first_slot;        // from this one on, up to slots_end, slots are live; all others are padding
  uint32_t slots_step, new_slots_step;  // bytes from a row's to the next row's
  bool dt_bias_half, slots_wide, new_slots_wide;  // half: of 16 bits; wide: int64
  Divisor by_group{1};       // group: value heads of one query/key head
  uint32_t H;
  int32_t slots_end;         // first_slot or more, as new_slots_end
  uint32_t head_bytes;       // from a head's state to the next, in new_pool too; a slot has less than 4 GiB
  const bool* has_state;     // [B]; null: all have one. A row without starts from a state of zeros
  const __nv_bfloat16* qkv;  // [B, 2 H K + HV V]
  const void* a;             // [B, HV] bfloat16
  const void* b;             // [B, HV] bfloat16
  const float* A_log;        // [HV]
  const void* dt_bias;       // [HV] float, or as tokens
  int64_t qkv_stride, a_stride, b_stride;
  float scale, epsilon;      // epsilon of the norm, under the root; below 0: q and k are taken as they are
  T* new_pool;               // like pool, and may be pool itself
  const void* new_slots;     // like slots: where the new states go; may be slots itself
  int64_t new_slot_stride;
  int32_t new_slots_end;
  __nv_bfloat16* output;     // [B, HV, V]
  bool wide_beta;            // GIVEN: b is of float

  bool plain() const { return !slots_wide && !new_slots_wide && head_bytes == V * K * sizeof(T); }

#ifdef __CUDACC__
  // A pool has less than 2^31 slots: a number of 64 bits that needs its high word is none of them.
  static __device__ __forceinline__ const int32_t* slot_at(const void* of, uint32_t i, uint32_t step) {
    return reinterpret_cast<const int32_t*>(static_cast<const char*>(of) + static_cast<uint64_t>(i) * step);
  }
  static __device__ __forceinline__ int32_t high_word(const void* of, uint32_t i, uint32_t step, bool wide) {
    return wide ? __ldg(slot_at(of, i, step) + 1) : 0;  // little-endian
  }
  // Two comparisons and the new slot's at once, or one that is unsigned and the new slot's before it is used: with what is best for
  // the other dtype ptxas orders loads so that some of B = 8 to 64 take 2 to 7 % longer (H100 and H200).
  static constexpr bool NEW_SLOT_FIRST = sizeof(T) == 4;
  __device__ __forceinline__ bool live(int32_t slot, int32_t end) const {
    if (NEW_SLOT_FIRST) return slot >= first_slot && slot < end;
    return static_cast<uint32_t>(slot) - first_slot < static_cast<uint32_t>(end) - first_slot;
  }
#endif
};

// A call that is plain(), as servers make it: slots of int32, the heads of a slot dense. An instance of its own, since the state's
// address waits neither for high words nor for a stride.
template <typename T>
struct PlainPool : PoolArguments<T> {
  static constexpr bool PLAIN = true;
};

// A call of either kind with gates that are given: a is log g, in float, and b beta, in float or bfloat16.
template <typename Pool>
struct GivenGates : Pool {
  static constexpr bool GIVEN = true;
};

// A call of either kind with tokens of float16: what Token says, whatever the pointers do.
template <typename Pool>
struct HalfTokens : Pool {
  using Token = __half;
};

#ifdef __CUDACC__

// N values of T from the words that hold them, and back.
template <int N>
__device__ __forceinline__ void unpack(float* x, const uint32_t* w, const __half*) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
template <int N>
__device__ __forceinline__ void pack(uint32_t* w, const float* x, const __half*) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    w[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <int N>
__device__ __forceinline__ void unpack(float* x, const uint32_t* w, const float*) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __uint_as_float(w[i]);
}
template <int N>
__device__ __forceinline__ void unpack(float* x, const uint32_t* w, const __nv_bfloat16*) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) x[2 * i] = low(w[i]), x[2 * i + 1] = high(w[i]);
}
template <int N>
__device__ __forceinline__ void pack(uint32_t* w, const float* x, const float*) {
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = __float_as_uint(x[i]);
}
template <int N>
__device__ __forceinline__ void pack(uint32_t* w, const float* x, const __nv_bfloat16*) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    w[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// N values of q or k, two to a word: through L1, since the CTAs of a head share them.
template <int N, typename Token>
__device__ __forceinline__ void load_pairs(uint32_t* w, const Token* p) {
  if constexpr (N == 4) {
    const uint2 u = __ldg(reinterpret_cast<const uint2*>(p));
    w[0] = u.x, w[1] = u.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      const uint4 u = __ldg(reinterpret_cast<const uint4*>(p + i));
      w[i / 2] = u.x, w[i / 2 + 1] = u.y, w[i / 2 + 2] = u.z, w[i / 2 + 3] = u.w;
    }
  }
}
template <int N>
__device__ __forceinline__ void load_bf16(float* x, const __nv_bfloat16* p) {
  uint32_t w[N / 2];
  load_pairs<N>(w, p);
  unpack<N>(x, w, p);
}

// BYTES (8 or 16) bytes of shared memory.
template <int BYTES>
__device__ __forceinline__ void read(uint32_t* w, const void* p) {
  if constexpr (BYTES == 16) {
    const uint4 u = *static_cast<const uint4*>(p);
    w[0] = u.x, w[1] = u.y, w[2] = u.z, w[3] = u.w;
  } else {
    const uint2 u = *static_cast<const uint2*>(p);
    w[0] = u.x, w[1] = u.y;
  }
}

// sum of a[i] * b[i], in CHAINS independent sums.
template <int N, int CHAINS>
__device__ __forceinline__ float dot(const float* a, const float* b) {
  float sum[CHAINS] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i % CHAINS] = fmaf(a[i], b[i], sum[i % CHAINS]);
#pragma unroll
  for (int c = 1; c < CHAINS; ++c) sum[0] += sum[c];
  return sum[0];
}

// Sums v[0..N) over LANES lanes, N a power of two up to LANES. The first steps split by the lane's highest bits, so
// lane l has in v[0] the sum of number l / (LANES / N).
template <int N, int LANES>
__device__ __forceinline__ void reduce_scatter(float* v, uint32_t lane) {
  int n = N;
#pragma unroll
  for (int m = LANES / 2; m > 0; m /= 2) {
    if (n > 1) {
      n /= 2;
      const bool upper = lane & m;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if (i < n) {
          const float give = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
          v[i] = keep + __shfl_xor_sync(0xffffffffu, give, m);
        }
      }
    } else {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], m);
    }
  }
}

// A call by slots: what a thread needs of its row besides the state, as it comes from memory. The state's address depends
// on the slot, which has to be loaded first: everything else is asked for meanwhile, and not used before the state is
// asked for too. A padding row has no branch: ptxas moves loads past one.
template <typename Pool, int LANES, int EACH, int PASSES>
struct PoolRow {
  static constexpr int CHUNK = K / LANES;
  uint32_t i_b, i_hv, k_pairs[CHUNK / 2], q_pairs[CHUNK / 2], a, b, dt_bias;
  int32_t slot, new_slot;
  bool live, has_state;      // not live: padding
  using Token = typename Pool::Token;
  Token v[PASSES];
  float A_log;

  // of value head i_bh of all B * HV; v of rows own, own + PASS, ... of all B * HV * V.
  __device__ __forceinline__ void load(const Pool& p, uint32_t i_bh, uint32_t lane, uint32_t own, uint32_t PASS) {
    i_b = p.by_HV.divide(i_bh), i_hv = i_bh - i_b * p.HV;
    slot = slot_of(p, p.slots, p.slots_step, p.slots_wide);
    has_state = p.has_state == nullptr || p.has_state[i_b];
    const Token* row = reinterpret_cast<const Token*>(p.qkv) + static_cast<int64_t>(i_b) * p.qkv_stride;
    const uint32_t i_h = p.by_group.divide(i_hv);
#pragma unroll
    for (int j = 0; j < CHUNK / EACH; ++j) {
      load_pairs<EACH>(k_pairs + j * EACH / 2, row + ((p.H + i_h) * K + lane * EACH) + j * LANES * EACH);
      load_pairs<EACH>(q_pairs + j * EACH / 2, row + (i_h * K + lane * EACH) + j * LANES * EACH);
    }
    a = gate_bits(p.a, i_b * p.a_stride + i_hv, Pool::GIVEN);
    b = gate_bits(p.b, i_b * p.b_stride + i_hv, Pool::GIVEN && p.wide_beta);
    if constexpr (!Pool::GIVEN) {
      A_log = p.A_log[i_hv];
      dt_bias = p.dt_bias_half ? static_cast<const uint16_t*>(p.dt_bias)[i_hv]
                               : static_cast<const uint32_t*>(p.dt_bias)[i_hv];
    }
    row += 2 * p.H * K;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) v[pass] = row[own + pass * PASS - i_b * p.HV * V];
    new_slot = slot_of(p, p.new_slots, p.new_slots_step, p.new_slots_wide);
    live = p.live(slot, p.slots_end);
    if (Pool::NEW_SLOT_FIRST && !p.live(new_slot, p.new_slots_end)) new_slot = -1;
  }
  // -1 for a slot that needs its high word.
  __device__ __forceinline__ int32_t slot_of(const Pool& p, const void* of, uint32_t step, bool wide) const {
    const int32_t low = __ldg(p.slot_at(of, i_b, step));
    return !Pool::PLAIN && p.high_word(of, i_b, step, wide) != 0 ? -1 : low;
  }
  __device__ __forceinline__ bool stored(const Pool& p) const {
    return live && (Pool::NEW_SLOT_FIRST ? new_slot >= 0 : p.live(new_slot, p.new_slots_end));
  }
};

template <typename Call, int LANES, int ROWS, int PASSES, int WARPS, int LOAD, int STORE, int RESIDENT>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT > WARPS ? RESIDENT / WARPS : 1)
gdn_decode_v5(const __grid_constant__ Call p) {
  using T = typename Call::State;
  using Token = typename Call::Token;
  constexpr int CHUNK = K / LANES;                                        // elements of a row that a lane has
  constexpr int EACH = CHUNK * int(sizeof(T)) < WIDEST ? CHUNK : WIDEST / int(sizeof(T));  // of one access
  constexpr int WORDS = EACH * int(sizeof(T)) / 4, ACCESSES = CHUNK / EACH;
  constexpr int GROUPS = 32 / LANES, PASS = WARPS * GROUPS * ROWS, TILE = PASS * PASSES, TILES = V / TILE;
  static_assert(V % TILE == 0 && 2 * ROWS <= LANES, "a CTA stays in one head; a lane has a sum at most");
  static_assert(PASSES == 1 || PASSES == 2 || PASSES == 4);

  constexpr uint32_t STRIDE = WARPS * GROUPS, ROW = K * sizeof(T), ACCESS = LANES * EACH * sizeof(T);
  const uint32_t lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
  // Several rows: after the reduce-scatter lane r * COPIES of the lower half has x of row r; it also has its v, d and o.
  // One row: all lanes have all of them.
  constexpr uint32_t COPIES = ROWS == 1 ? LANES : LANES / (2 * ROWS);
  [[maybe_unused]] PoolRow<Call, LANES, EACH, PASSES> row;

  // 1. Load S. Row r of a lane is r * STRIDE rows after its first. All offsets after the state's, or after the slot's, have 32 bits.
  uint64_t at;
  const char* from;
  if constexpr (Call::POOLED) {
    const uint32_t r_own = ROWS == 1 ? 0 : lane % (LANES / 2) / COPIES;
    row.load(p, blockIdx.x / TILES, lane, blockIdx.x * TILE + first + r_own * STRIDE, PASS);
    const uint32_t head_bytes = Call::PLAIN ? V * ROW : p.head_bytes;
    at = row.i_hv * head_bytes + (blockIdx.x % TILES * TILE + first) * ROW + lane * EACH * static_cast<uint32_t>(sizeof(T));
    from = reinterpret_cast<const char*>(p.pool + row.slot * p.slot_stride) + at;
  } else {
    at = static_cast<uint64_t>(blockIdx.x) * (TILE * ROW) + (first * ROW + lane * EACH * sizeof(T));
    from = reinterpret_cast<const char*>(p.state) + at;
  }
  bool there = true;
  if constexpr (Call::POOLED) there = row.live && row.has_state;          // else zeros
  uint32_t w[ROWS][ACCESSES][WORDS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int j = 0; j < ACCESSES; ++j)
      if (there) load<WORDS * 4, LOAD>(w[r][j], from + r * STRIDE * ROW + j * ACCESS);
  // A thread's PIECES of an access in the later passes, PIECE bytes each, the threads of a warp side by side.
  constexpr int PIECE = WORDS * 4 < 16 ? WORDS * 4 : 16, PIECES = WORDS * 4 / PIECE;
  alignas(16) __shared__ char ahead[PASSES > 1 ? PASSES - 1 : 1][ROWS][ACCESSES][PIECES][WARPS * 32][PIECE];
#pragma unroll
  for (int pass = 1; pass < PASSES; ++pass) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < ACCESSES; ++j)
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
          char* to = ahead[pass - 1][r][j][i][threadIdx.x];
          if (there)
            ptx::copy_async<PIECE>(to, from + pass * PASS * ROW + r * STRIDE * ROW + j * ACCESS + i * PIECE);
          else
            for (int n = 0; n < PIECE; n += 4) *reinterpret_cast<uint32_t*>(to + n) = 0;
        }
    ptx::commit_copies();
  }
  if constexpr (!Call::POOLED && LOAD == LOAD_FIRST)
    if (static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.state)) < 0) return;  // never: see above

  // 2. Load k, q, v and the gates' inputs
  float k[CHUNK], q[CHUNK], v_own[PASSES], g, beta;
  const uint32_t i_bh = blockIdx.x / TILES;                               // batch * HV + value head
  [[maybe_unused]] uint32_t i_hv;
  if constexpr (!Call::POOLED) {
    const uint32_t i_h = p.by_group.divide(i_bh);                         // batch * H + query/key head
    i_hv = i_bh - p.by_HV.divide(i_bh) * p.HV;
#pragma unroll
    for (int j = 0; j < ACCESSES; ++j) {
      load_bf16<EACH>(k + j * EACH, p.k + (i_h * K + lane * EACH) + j * LANES * EACH);
      load_bf16<EACH>(q + j * EACH, p.q + (i_h * K + lane * EACH) + j * LANES * EACH);
    }
  }
  const uint32_t r_own = ROWS == 1 ? 0 : lane % (LANES / 2) / COPIES;
  const uint32_t own = blockIdx.x * TILE + first + r_own * STRIDE;        // of all B * HV * V rows
  if constexpr (!Call::POOLED) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) v_own[pass] = __bfloat162float(p.v[own + pass * PASS]);
    // 3. Gates
    const float x_gate = __bfloat162float(p.a[i_bh]) + p.dt_bias[i_hv];
    g = decay(p.A_log[i_hv], x_gate), beta = sigmoid(__bfloat162float(p.b[i_bh]));
  } else {
    unpack<CHUNK>(k, row.k_pairs, static_cast<const Token*>(nullptr)), unpack<CHUNK>(q, row.q_pairs, static_cast<const Token*>(nullptr));
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) v_own[pass] = to_float(row.v[pass]);
    float dt_bias = 0.f;
    if constexpr (!Call::GIVEN) dt_bias = gate_value<Token>(row.dt_bias, !p.dt_bias_half);
    g = exp2_approx(log2_gate<Token>(row.a, Call::GIVEN, row.A_log, dt_bias));
    beta = beta_gate<Token>(row.b, Call::GIVEN, Call::GIVEN && p.wide_beta);
  }

  // 4. Dots. With one row no other work hides the latency of 16 dependent additions: use two chains of 8.
  constexpr int CHAINS = ROWS == 1 && CHUNK == 16 ? 2 : 1;
  float z = dot<CHUNK, CHAINS>(k, q);
  [[maybe_unused]] float k_norm, q_norm;
  if constexpr (Call::POOLED) {
    // The norms are factors of the sums, x and y and z, and of d in the update: cheaper than k and q themselves.
    float kk = dot<CHUNK, 1>(k, k), qq = dot<CHUNK, 1>(q, q);
#pragma unroll
    for (int m = LANES / 2; m > 0; m /= 2) {
      kk += __shfl_xor_sync(0xffffffffu, kk, m);
      qq += __shfl_xor_sync(0xffffffffu, qq, m);
      z += __shfl_xor_sync(0xffffffffu, z, m);
    }
    k_norm = p.epsilon < 0.f ? 1.f : rsqrtf(kk + p.epsilon), q_norm = p.epsilon < 0.f ? 1.f : rsqrtf(qq + p.epsilon);
    z *= k_norm * q_norm;
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    if (pass > 0) {
      switch (PASSES - 1 - pass) {  // how many passes may still be on their way: a compile-time constant
        case 0: ptx::wait_for_copies<0>(); break;
        case 1: ptx::wait_for_copies<1>(); break;
        default: ptx::wait_for_copies<2>();
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int j = 0; j < ACCESSES; ++j)
#pragma unroll
          for (int i = 0; i < PIECES; ++i) read<PIECE>(&w[r][j][i * PIECE / 4], ahead[pass - 1][r][j][i][threadIdx.x]);
    }
    float sums[2 * ROWS];                                                 // x of each row, then y of each
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float s[CHUNK];
#pragma unroll
      for (int j = 0; j < ACCESSES; ++j) unpack<EACH>(s + j * EACH, w[r][j], static_cast<const T*>(nullptr));
      sums[r] = dot<CHUNK, CHAINS>(s, k), sums[ROWS + r] = dot<CHUNK, CHAINS>(s, q);
    }
    // 5. Reduce
    float x, y;
    if constexpr (ROWS == 1) {
#pragma unroll
      for (int m = LANES / 2; m > 0; m /= 2) {
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], m);
        sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], m);
        if (!Call::POOLED && pass == 0) z += __shfl_xor_sync(0xffffffffu, z, m);
      }
      x = sums[0], y = sums[1];
    } else {
      if (!Call::POOLED && pass == 0) {
#pragma unroll
        for (int m = LANES / 2; m > 0; m /= 2) z += __shfl_xor_sync(0xffffffffu, z, m);
      }
      reduce_scatter<2 * ROWS, LANES>(sums, lane);
      const float other = __shfl_xor_sync(0xffffffffu, sums[0], LANES / 2);  // exchanges x and y
      x = lane < LANES / 2 ? sums[0] : other, y = lane < LANES / 2 ? other : sums[0];
    }
    if constexpr (Call::POOLED) x *= k_norm, y *= q_norm;
    float d_own = beta * (v_own[pass] - g * x);
    if ((ROWS == 1 || lane < LANES / 2) && lane % COPIES == 0) {
      if constexpr (Call::POOLED)
        reinterpret_cast<Token*>(p.output)[own + pass * PASS] = to_token<Token>(row.live ? p.scale * (g * y + d_own * z) : 0.f);
      else
        p.output[own + pass * PASS] = __float2bfloat16(p.scale * (g * y + d_own * z));
    }
    if constexpr (Call::POOLED) d_own *= k_norm;

    // 6. Update and store
    char* to;
    if constexpr (Call::POOLED) {
      if (!row.stored(p)) continue;
      to = reinterpret_cast<char*>(p.new_pool + row.new_slot * p.new_slot_stride) + at + pass * PASS * ROW;
    } else {
      to = reinterpret_cast<char*>(p.new_state) + at + pass * PASS * ROW;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float d = ROWS == 1 ? d_own : __shfl_sync(0xffffffffu, d_own, r * COPIES, LANES);
#pragma unroll
      for (int j = 0; j < ACCESSES; ++j) {
        float s[EACH];
        unpack<EACH>(s, w[r][j], static_cast<const T*>(nullptr));
#pragma unroll
        for (int i = 0; i < EACH; ++i) s[i] = fmaf(d, k[j * EACH + i], g * s[i]);
        pack<EACH>(w[r][j], s, static_cast<const T*>(nullptr));
        store<WORDS * 4, STORE>(to + r * STRIDE * ROW + j * ACCESS, w[r][j]);
      }
    }
  }
}

// The same for a pool whose states are [K, V], a kernel of its own: gdn_decode_v5 with this in it becomes other machine code.
// LANES lanes have the rows of K, CHUNK each, and of these COLUMNS of V side by side, 16 bytes; the lanes of a warp with the same
// rows lie side by side, so that sectors are whole. A column's sums are over the lanes, as a row's are above.
template <typename Call, int LANES, int WARPS, int RESIDENT>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT > WARPS ? RESIDENT / WARPS : 1)
gdn_decode_k_first(const __grid_constant__ Call p) {
  using T = typename Call::State;
  using Token = typename Call::Token;
  constexpr int COLUMNS = 16 / sizeof(T), CHUNK = K / LANES, EACH = 8;  // EACH: of k and q in one access
  constexpr int TILE = WARPS * (32 / LANES) * COLUMNS, TILES = V / TILE;
  constexpr int OWN = 2 * COLUMNS > LANES ? 2 * COLUMNS / LANES : 1, COPIES = OWN > 1 ? 1 : LANES / (2 * COLUMNS);
  constexpr uint32_t ROW = V * sizeof(T), ALL = 0xffffffffu;
  static_assert(V % TILE == 0 && CHUNK % EACH == 0);
  const auto line = [](int i) -> uint32_t { return (i / EACH * LANES * EACH + i % EACH) * ROW; };
  const uint32_t lane = threadIdx.x % LANES, column = blockIdx.x % TILES * TILE + threadIdx.x / LANES * COLUMNS;

  // 1. Load S
  PoolRow<Call, LANES, EACH, OWN> row;
  const uint32_t own = blockIdx.x / TILES * V + column + lane % (LANES / 2) / COPIES * OWN;  // a lane's sums, of all B * HV * V
  row.load(p, blockIdx.x / TILES, lane, own, 1);
  const uint32_t at = row.i_hv * p.head_bytes + lane * (EACH * ROW) + column * static_cast<uint32_t>(sizeof(T));
  const char* const from = reinterpret_cast<const char*>(p.pool + row.slot * p.slot_stride) + at;
  const bool there = row.live && row.has_state;            // else zeros
  uint32_t w[CHUNK][4] = {};
#pragma unroll
  for (int i = 0; i < CHUNK; ++i)
    if (there) load<16, LOAD_FIRST>(w[i], from + line(i));

  // 2. and 3.: k, q and v are there
  float k[CHUNK], q[CHUNK], dt_bias = 0.f;
  unpack<CHUNK>(k, row.k_pairs, static_cast<const Token*>(nullptr)), unpack<CHUNK>(q, row.q_pairs, static_cast<const Token*>(nullptr));
  if constexpr (!Call::GIVEN) dt_bias = gate_value<Token>(row.dt_bias, !p.dt_bias_half);
  const float g = exp2_approx(log2_gate<Token>(row.a, Call::GIVEN, row.A_log, dt_bias));
  const float beta = beta_gate<Token>(row.b, Call::GIVEN, Call::GIVEN && p.wide_beta);

  // 4. Dots
  float kk = dot<CHUNK, 1>(k, k), qq = dot<CHUNK, 1>(q, q), z = dot<CHUNK, 1>(k, q);
#pragma unroll
  for (int m = LANES / 2; m > 0; m /= 2)
    kk += __shfl_xor_sync(ALL, kk, m), qq += __shfl_xor_sync(ALL, qq, m), z += __shfl_xor_sync(ALL, z, m);
  const float k_norm = p.epsilon < 0.f ? 1.f : rsqrtf(kk + p.epsilon), q_norm = p.epsilon < 0.f ? 1.f : rsqrtf(qq + p.epsilon);
  z *= k_norm * q_norm;
  float sums[2 * COLUMNS] = {};                               // x of each column, then y of each
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    float s[COLUMNS];
    unpack<COLUMNS>(s, w[i], static_cast<const T*>(nullptr));
#pragma unroll
    for (int r = 0; r < COLUMNS; ++r) sums[r] = fmaf(s[r], k[i], sums[r]), sums[COLUMNS + r] = fmaf(s[r], q[i], sums[COLUMNS + r]);
  }

  // 5. Reduce
  reduce_scatter<2 * COLUMNS, LANES>(sums, lane);
  float d_own[OWN], d[COLUMNS];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float other = __shfl_xor_sync(ALL, sums[i], LANES / 2);  // exchanges x and y
    const float x = k_norm * (lane < LANES / 2 ? sums[i] : other), y = q_norm * (lane < LANES / 2 ? other : sums[i]);
    d_own[i] = beta * (to_float(row.v[i]) - g * x);
    if (lane < LANES / 2 && lane % COPIES == 0)
      reinterpret_cast<Token*>(p.output)[own + i] = to_token<Token>(row.live ? p.scale * (g * y + d_own[i] * z) : 0.f);
    d_own[i] *= k_norm;
  }

  // 6. Update and store
  if (!row.stored(p)) return;
  char* const to = reinterpret_cast<char*>(p.new_pool + row.new_slot * p.new_slot_stride) + at;
#pragma unroll
  for (int r = 0; r < COLUMNS; ++r) d[r] = __shfl_sync(ALL, d_own[r % OWN], r / OWN * COPIES, LANES);
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    float s[COLUMNS];
    unpack<COLUMNS>(s, w[i], static_cast<const T*>(nullptr));
#pragma unroll
    for (int r = 0; r < COLUMNS; ++r) s[r] = fmaf(d[r], k[i], g * s[r]);
    pack<COLUMNS>(w[i], s, static_cast<const T*>(nullptr));
    store<16, STORE_PLAIN>(to + line(i), w[i]);
  }
}

#endif  // __CUDACC__

}  // namespace gdn
