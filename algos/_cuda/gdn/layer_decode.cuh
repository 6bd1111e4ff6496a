// One token of a decode layer in one launch: the update of its causal convolution, decode's step, and RMSNorm with its gate.
//
//   c = silu(w0 s0 + w1 s1 + w2 s2 + w3 x + bias);  s0, s1, s2 = s1, s2, x     of each channel of q, k and v
//   o = the step of decode.cuh on q, k and v of c, in float
//   y = o rsqrt(sum(o^2) / V + epsilon) weight silu(gate)                      o [V] of a head, rounded to bfloat16; or sigmoid
//
// A state is read, multiplied and written as in decode.cuh, by the same constants; this file has what is around that. A cluster is
// the CTAs of a query/key head of a row: those of all its value heads, TILES for each.
//
// The convolution. The threads of a CTA share its channels, two to a thread at a time: all of q and k, which each CTA of the
// cluster computes for itself, and v of its own rows. What they have read of the state of the convolution arrives with the first
// rows of S. The results go through shared memory.
//
// Why nobody reads a state of the convolution that has been shifted already: that of v is read by the CTA alone that shifts it, each
// word by the thread that writes it afterwards. That of q and k is read by all CTAs of the cluster, and written by its first one.
// Each thread arrives at a barrier of the cluster when all threads of its CTA have computed with what they have read, and so have it
// in registers; the first CTA writes when it has waited for that barrier. No other cluster has these channels of this slot.
//
// Without CONV q, k and v come as they are, after a convolution, and a cluster is the CTAs of one value head.
//
// The norm. A head's sum of squares needs all its rows. Each warp sends the sum of its own ones to all CTAs of the head, its own
// among them, by stores that count for a barrier there (st.async), then writes its states, and only then waits. The same barrier of
// the cluster as above is waited for before: all CTAs have begun by then. And they are there as long as others write to them, since
// their own warps wait for the sums of all warps of the head. With outputs of eight bits the largest |o weight gate| goes the same
// way: the norm is one factor for all of a head.
// Provenance: as decode.cuh; the convolution is Mamba's (arXiv 2312.00752), the norm RMSNorm (arXiv 1910.07467). Written here.
#pragma once

#include "cluster.cuh"
#include "decode.cuh"
#include "e4m3.cuh"
#include "mma_bf16.cuh"
#include "order.cuh"
#include "wgmma_tokens.cuh"

namespace gdn {

constexpr int TAPS = 4;
constexpr float LARGEST_E4M3 = 448.f, LEAST_AMAX = 1e-10f;  // a head of zeros has a scale, too

// What a call has around its step. Without CONV there is nothing of the convolution; with it no accepted.
struct AroundStep {
  const void* accepted;              // [B] int32 or int64, or null: a row whose number is not 1 is padding
  __nv_bfloat16* conv_state;         // [slots, channels, 3]: of the channels of qkv, the last three tokens, the oldest first
  const __nv_bfloat16* conv_weight;  // [channels, 4], the token's own last
  const __nv_bfloat16* conv_bias;    // [channels], or null
  int64_t conv_slot_stride;          // of elements
  // Two channels are three words of 32 bits, which lie word_bytes apart: a tap of both, or, taps_inner, six taps one after the
  // other. pair_bytes: to the next two channels.
  uint32_t pair_bytes, word_bytes;
  const __nv_bfloat16* gate;         // [B, HV, V]
  const void* norm_weight;           // [V] float or bfloat16
  int64_t gate_stride;
  float norm_epsilon;                // under the root, added to the mean square
  uint8_t accepted_shift;            // log2 of an element's bytes
  bool taps_inner, weight_bf16, sigmoid;  // sigmoid: of gate; else silu
};

// Pool: PlainPool or PoolArguments; new_pool, new_slots and has_state of it are not used.
template <typename Pool>
struct LayerDecode : Pool, AroundStep {
  static constexpr bool SCALED = false;
};

struct HeadScales {
  float* output_scale;            // [B, HV]
  int64_t scale_row, scale_head;  // its strides
};

// Outputs are of eight bits, e4m3, and to be multiplied by their head's scale.
template <typename Pool>
struct ScaledLayerDecode : LayerDecode<Pool>, HeadScales {
  static constexpr bool SCALED = true;
};

#ifdef __CUDACC__

// Element i of a vector of float, or of bfloat16 if `narrow`, as float: its two halves, so that neither kind has a branch.
struct Halves {
  uint32_t upper, lower;
  __device__ __forceinline__ void ask(const void* of, uint32_t i, bool narrow) {
    const char* const at = static_cast<const char*>(of) + (i << (narrow ? 1 : 2));
    ptx::load_now<2>(&upper, at + (narrow ? 0 : 2));
    ptx::load_now<2>(&lower, at);
  }
  __device__ __forceinline__ float value(bool narrow) const { return __uint_as_float(upper << 16 | (narrow ? 0 : lower)); }
};

// The convolution of q and k of a head and of TILE rows of v, by THREADS threads. Without CONV: these values as they are.
template <bool CONV, int TILE, int THREADS>
class Convolution {
  static constexpr int PAIRS = K + TILE / 2, ROUNDS = (PAIRS + THREADS - 1) / THREADS;  // K / 2 of q, as many of k

 public:
  struct Memory {
    float c[2 * K + TILE];  // q, k, v
    uint32_t shifted[CONV ? 3 : 1][CONV ? K : 1];  // of q and k, in the first CTA
  };

 private:
  Memory& memory;
  uint32_t x[ROUNDS], bias[ROUNDS], weight[ROUNDS][4], taps[ROUNDS][3], channel[ROUNDS];

  static __device__ __forceinline__ uint32_t number(int round) { return threadIdx.x + round * THREADS; }
  static __device__ __forceinline__ bool has(int round) { return (round + 1) * THREADS <= PAIRS || number(round) < PAIRS; }
  // which of a row's channels, the first of two; v0: the first row of v
  static __device__ __forceinline__ uint32_t channel_of(uint32_t n, uint32_t H, uint32_t i_h, uint32_t v0) {
    if (n >= K) return 2 * H * K + v0 + 2 * (n - K);
    return (n < K / 2 ? i_h : H + i_h) * K + 2 * (n % (K / 2));
  }
  template <typename Call>
  static __device__ __forceinline__ char* word(const Call& p, int64_t slot, uint32_t channel, int i) {
    return reinterpret_cast<char*>(p.conv_state + slot * p.conv_slot_stride) + channel / 2 * p.pair_bytes + i * p.word_bytes;
  }
  static __device__ __forceinline__ float silu(float c) { return c * sigmoid(c); }

 public:
  __device__ __forceinline__ explicit Convolution(Memory& memory) : memory(memory) {}

  // What does not depend on the slot.
  template <typename Call>
  __device__ __forceinline__ void ask(const Call& p, uint32_t i_b, uint32_t i_h, uint32_t v0) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      channel[r] = channel_of(has(r) ? number(r) : 0, p.H, i_h, v0);
      ptx::load_now<4>(&x[r], p.qkv + (i_b * p.qkv_stride + channel[r]));
      if constexpr (CONV) {
        ptx::load_now<16>(weight[r], p.conv_weight + channel[r] * TAPS);
        bias[r] = ptx::load_now_if(p.conv_bias != nullptr, p.conv_bias + channel[r]);
      }
    }
  }
  template <typename Call>
  __device__ __forceinline__ void ask_state(const Call& p, int32_t slot, bool there) {
    if constexpr (CONV) {
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
        for (int i = 0; i < 3; ++i) taps[r][i] = ptx::load_now_if(there, word(p, slot, channel[r], i));
    }
  }
  // Then a barrier of the CTA.
  template <typename Call>
  __device__ __forceinline__ void compute(const Call& p, int32_t slot, bool there, bool first) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      if constexpr (!CONV) {
        if (has(r)) *reinterpret_cast<float2*>(&memory.c[2 * number(r)]) = {low(x[r]), high(x[r])};
        continue;
      }
      uint32_t(&t)[3] = taps[r];
      if (p.taps_inner) {  // to a word for each tap
        const uint32_t a = t[0], b = t[1], c = t[2];
        t[0] = __byte_perm(a, b, 0x7610), t[1] = __byte_perm(a, c, 0x5432), t[2] = __byte_perm(b, c, 0x7610);
      }
      float2 c{low(bias[r]), high(bias[r])};
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
        const uint32_t of_both = i < 3 ? t[i] : x[r], w = weight[r][i / 2], w_next = weight[r][2 + i / 2];
        c.x = fmaf(i % 2 ? high(w) : low(w), low(of_both), c.x);
        c.y = fmaf(i % 2 ? high(w_next) : low(w_next), high(of_both), c.y);
      }
      const uint32_t n = number(r);
      if (has(r)) *reinterpret_cast<float2*>(&memory.c[2 * n]) = {silu(c.x), silu(c.y)};
      t[0] = t[1], t[1] = t[2], t[2] = x[r];
      if (p.taps_inner) {
        const uint32_t a = t[0], b = t[1], next = t[2];
        t[0] = __byte_perm(a, b, 0x5410), t[1] = __byte_perm(next, a, 0x7610), t[2] = __byte_perm(b, next, 0x7632);
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (n >= K && has(r) && there) *reinterpret_cast<uint32_t*>(word(p, slot, channel[r], i)) = t[i];
        if (n < K && first) memory.shifted[i][n] = t[i];
      }
    }
  }
  // N of the values from `at` on.
  template <int N>
  __device__ __forceinline__ void values(float* c, uint32_t at) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 u = *reinterpret_cast<const float4*>(&memory.c[at + i]);
      c[i] = u.x, c[i + 1] = u.y, c[i + 2] = u.z, c[i + 3] = u.w;
    }
  }
  __device__ __forceinline__ float value(uint32_t at) const { return memory.c[at]; }
  // The new state of q and k. By all threads of the first CTA, each what it has computed itself.
  template <typename Call>
  __device__ __forceinline__ void shift(const Call& p, int32_t slot, uint32_t i_h) const {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const uint32_t n = number(r);
      if (n >= K) continue;
#pragma unroll
      for (int i = 0; i < 3; ++i)
        *reinterpret_cast<uint32_t*>(word(p, slot, channel_of(n, p.H, i_h, 0), i)) = memory.shifted[i][n];
    }
  }
};

// What the kernel has in shared memory. SUMS: of a head.
template <bool CONV, int TILE, int THREADS, int SUMS, int AHEAD>
struct LayerDecodeMemory {
  alignas(16) char ahead[AHEAD];  // S of later passes
  typename Convolution<CONV, TILE, THREADS>::Memory convolution;
  uint64_t arrived;  // bytes of squares and largest
  alignas(16) float squares[SUMS];
  float largest[SUMS];
};

// Constants as gdn_decode_v5 has them.
template <typename T, bool CONV, int LANES, int ROWS, int PASSES, int WARPS>
struct LayerDecodeShape {
  static constexpr int THREADS = WARPS * 32, GROUPS = 32 / LANES, PASS = WARPS * GROUPS * ROWS, TILE = PASS * PASSES;
  static constexpr int TILES = V / TILE, SUMS = TILES * WARPS, ROW = K * int(sizeof(T));
  static constexpr int AHEAD = PASSES > 1 ? (PASSES - 1) * PASS * ROW : 16;
  static_assert(V % TILE == 0 && 2 * ROWS <= LANES && TILES <= 16);
  using Memory = LayerDecodeMemory<CONV, TILE, THREADS, SUMS, AHEAD>;
};

template <typename Call, bool CONV, int LANES, int ROWS, int PASSES, int WARPS, int LOAD, int STORE, int RESIDENT>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT > WARPS ? RESIDENT / WARPS : 1)
gdn_layer_decode(const __grid_constant__ Call p) {
#if FLASHCORE_COPY_ENGINE  // there are clusters; the host does not launch it elsewhere
  using T = typename Call::State;
  using Shape = LayerDecodeShape<T, CONV, LANES, ROWS, PASSES, WARPS>;
  constexpr int TILE = Shape::TILE, TILES = Shape::TILES, PASS = Shape::PASS, THREADS = Shape::THREADS;
  constexpr int CHUNK = K / LANES;                                        // elements of a row that a lane has
  constexpr int EACH = CHUNK * int(sizeof(T)) < WIDEST ? CHUNK : WIDEST / int(sizeof(T));  // of one access
  constexpr int WORDS = EACH * int(sizeof(T)) / 4, ACCESSES = CHUNK / EACH;
  constexpr uint32_t STRIDE = WARPS * Shape::GROUPS, ROW = Shape::ROW, ACCESS = LANES * EACH * sizeof(T);
  constexpr uint32_t COPIES = ROWS == 1 ? LANES : LANES / (2 * ROWS), ALL = 0xffffffffu;
  auto& memory = *reinterpret_cast<typename Shape::Memory*>(shared_memory());
  Convolution<CONV, TILE, THREADS> convolution(memory.convolution);
  const uint32_t lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
  const uint32_t r_own = ROWS == 1 ? 0 : lane % (LANES / 2) / COPIES;     // as in decode.cuh: of the row whose o this lane has

  const uint32_t rank = cluster_rank();
  const auto begin = [&] {
    if (TILES > 1 && threadIdx.x == 0) {
      mbarrier_init(shared_address(&memory.arrived), 1);
      mbarrier_arrive_expect_tx(shared_address(&memory.arrived), sizeof memory.squares * (Call::SCALED ? 2 : 1));
      mbarrier_init_fence();
    }
  };
  if constexpr (!CONV) {  // before any load, for which the fence would wait
    begin();
    __syncwarp();
    flashcore::cluster_arrive_only();
  }

  // 1. What does not depend on the slot, while that is on its way
  const uint32_t i_bh = blockIdx.x / TILES, tile = blockIdx.x % TILES;
  const uint32_t i_b = p.by_HV.divide(i_bh), i_hv = i_bh - i_b * p.HV, i_h = p.by_group.divide(i_hv);
  int32_t slot = __ldg(p.slot_at(p.slots, i_b, p.slots_step));
  if (!Call::PLAIN && p.high_word(p.slots, i_b, p.slots_step, p.slots_wide) != 0) slot = -1;
  convolution.ask(p, i_b, i_h, i_hv * V + tile * TILE);
  uint32_t a, b, A_log, gates[PASSES];
  Halves dt_bias, weights[PASSES];
  ptx::load_now<2>(&a, static_cast<const uint16_t*>(p.a) + (i_b * p.a_stride + i_hv));
  ptx::load_now<2>(&b, static_cast<const uint16_t*>(p.b) + (i_b * p.b_stride + i_hv));
  ptx::load_now<4>(&A_log, p.A_log + i_hv);
  dt_bias.ask(p.dt_bias, i_hv, p.dt_bias_half);
  const uint32_t own = tile * TILE + first + r_own * STRIDE;              // of the head's rows, in the first pass
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    ptx::load_now<2>(&gates[pass], p.gate + (i_b * p.gate_stride + i_hv * V + own + pass * PASS));
    weights[pass].ask(p.norm_weight, own + pass * PASS, p.weight_bf16);
  }

  bool live = p.live(slot, p.slots_end);
  if constexpr (!CONV) {
    const char* const accepted = static_cast<const char*>(p.accepted) + (i_b << p.accepted_shift);
    const uint32_t count = ptx::load_now_if(p.accepted != nullptr, accepted);
    const uint32_t above = ptx::load_now_if(p.accepted != nullptr && p.accepted_shift == 3, accepted + 4);  // little-endian
    live = live && (p.accepted == nullptr || (count == 1 && above == 0));
  }

  // 2. The state of the convolution, then S; of padding zeros
  convolution.ask_state(p, slot, live);
  const uint32_t head_bytes = Call::PLAIN ? V * ROW : p.head_bytes;
  const uint32_t at = i_hv * head_bytes + (tile * TILE + first) * ROW + lane * EACH * static_cast<uint32_t>(sizeof(T));
  char* const state = reinterpret_cast<char*>(const_cast<T*>(p.pool) + slot * p.slot_stride) + at;
  uint32_t w[ROWS][ACCESSES][WORDS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int j = 0; j < ACCESSES; ++j)
      if (live) load<WORDS * 4, LOAD>(w[r][j], state + r * STRIDE * ROW + j * ACCESS);
  constexpr int PIECE = WORDS * 4 < 16 ? WORDS * 4 : 16, PIECES = WORDS * 4 / PIECE;
  const auto ahead = [&](int pass, int r, int j, int i) {
    return memory.ahead + ((((pass - 1) * ROWS + r) * ACCESSES + j) * PIECES + i) * THREADS * PIECE + threadIdx.x * PIECE;
  };
#pragma unroll
  for (int pass = 1; pass < PASSES; ++pass) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < ACCESSES; ++j)
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
          char* const to = ahead(pass, r, j, i);
          if (live)
            ptx::copy_async<PIECE>(to, state + pass * PASS * ROW + r * STRIDE * ROW + j * ACCESS + i * PIECE);
          else
            for (int n = 0; n < PIECE; n += 4) *reinterpret_cast<uint32_t*>(to + n) = 0;
        }
    ptx::commit_copies();
  }

  // 3. The convolution; who has computed with what it has read arrives at the cluster's barrier
  if constexpr (CONV) begin();
  convolution.compute(p, slot, live, rank == 0);
  __syncthreads();
  if constexpr (CONV) flashcore::cluster_arrive_only();

  // 4. Gates and dots, as in decode.cuh
  float k[CHUNK], q[CHUNK];
#pragma unroll
  for (int j = 0; j < ACCESSES; ++j) {
    convolution.template values<EACH>(q + j * EACH, lane * EACH + j * LANES * EACH);
    convolution.template values<EACH>(k + j * EACH, K + lane * EACH + j * LANES * EACH);
  }
  const float g = decay(__uint_as_float(A_log), token_value<__nv_bfloat16>(a) + dt_bias.value(p.dt_bias_half));
  const float beta = sigmoid(token_value<__nv_bfloat16>(b));
  const auto scaled = [&](int pass) {
    const float x = low(gates[pass]), opened = p.sigmoid ? sigmoid(x) : x * sigmoid(x);
    return weights[pass].value(p.weight_bf16) * opened;
  };
  constexpr int CHAINS = ROWS == 1 && CHUNK == 16 ? 2 : 1;
  float z = dot<CHUNK, CHAINS>(k, q), kk = dot<CHUNK, 1>(k, k), qq = dot<CHUNK, 1>(q, q);
#pragma unroll
  for (int m = LANES / 2; m > 0; m /= 2) {
    kk += __shfl_xor_sync(ALL, kk, m);
    qq += __shfl_xor_sync(ALL, qq, m);
    z += __shfl_xor_sync(ALL, z, m);
  }
  const float k_norm = rsqrtf(kk + p.epsilon), q_norm = rsqrtf(qq + p.epsilon);
  z *= k_norm * q_norm;
  float o[PASSES], square = 0.f;
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
          for (int i = 0; i < PIECES; ++i) read<PIECE>(&w[r][j][i * PIECE / 4], ahead(pass, r, j, i));
    }
    float sums[2 * ROWS];                                                 // x of each row, then y of each
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float s[CHUNK];
#pragma unroll
      for (int j = 0; j < ACCESSES; ++j) unpack<EACH>(s + j * EACH, w[r][j], static_cast<const T*>(nullptr));
      sums[r] = dot<CHUNK, CHAINS>(s, k), sums[ROWS + r] = dot<CHUNK, CHAINS>(s, q);
    }
    float x, y;
    if constexpr (ROWS == 1) {
#pragma unroll
      for (int m = LANES / 2; m > 0; m /= 2) {
        sums[0] += __shfl_xor_sync(ALL, sums[0], m);
        sums[1] += __shfl_xor_sync(ALL, sums[1], m);
      }
      x = sums[0], y = sums[1];
    } else {
      reduce_scatter<2 * ROWS, LANES>(sums, lane);
      const float other = __shfl_xor_sync(ALL, sums[0], LANES / 2);       // exchanges x and y
      x = lane < LANES / 2 ? sums[0] : other, y = lane < LANES / 2 ? other : sums[0];
    }
    x *= k_norm, y *= q_norm;
    const float v = convolution.value(2 * K + first + r_own * STRIDE + pass * PASS);
    float d_own = beta * (v - g * x);
    o[pass] = __bfloat162float(__float2bfloat16(p.scale * (g * y + d_own * z)));
    square = fmaf(o[pass], o[pass], square);
    d_own *= k_norm;

    // 5. After the last o: the sum of this warp's rows to all CTAs of the head
    if (pass == PASSES - 1) {
#pragma unroll
      for (uint32_t m = COPIES; m < LANES / 2; m *= 2) square += __shfl_xor_sync(ALL, square, m);
#pragma unroll
      for (uint32_t m = LANES; m < 32; m *= 2) square += __shfl_xor_sync(ALL, square, m);
      float largest = 0.f;
      if constexpr (Call::SCALED) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i) largest = fmaxf(largest, fabsf(o[i] * scaled(i)));
#pragma unroll
        for (uint32_t m = COPIES; m < LANES / 2; m *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, m));
#pragma unroll
        for (uint32_t m = LANES; m < 32; m *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, m));
      }
      const uint32_t thread = threadIdx.x % 32, warp = threadIdx.x / 32;
      if (TILES > 1 || (CONV && rank == 0)) flashcore::cluster_wait();
      if constexpr (TILES == 1) {
        if (thread == 0) memory.squares[warp] = square;
        if (Call::SCALED && thread == 0) memory.largest[warp] = largest;
      } else if (thread < TILES) {
        const int to = static_cast<int>(rank - tile + thread);
        const uint32_t barrier = at_peer(shared_address(&memory.arrived), to), place = tile * WARPS + warp;
        store_at_peer(at_peer(shared_address(&memory.squares[place]), to), __float_as_uint(square), barrier);
        if constexpr (Call::SCALED) store_at_peer(at_peer(shared_address(&memory.largest[place]), to), __float_as_uint(largest), barrier);
      }
    }

    // 6. Update and store
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float d = ROWS == 1 ? d_own : __shfl_sync(ALL, d_own, r * COPIES, LANES);
#pragma unroll
      for (int j = 0; j < ACCESSES; ++j) {
        float s[EACH];
        unpack<EACH>(s, w[r][j], static_cast<const T*>(nullptr));
#pragma unroll
        for (int i = 0; i < EACH; ++i) s[i] = fmaf(d, k[j * EACH + i], g * s[i]);
        pack<EACH>(w[r][j], s, static_cast<const T*>(nullptr));
        if (live) store<WORDS * 4, STORE>(state + pass * PASS * ROW + r * STRIDE * ROW + j * ACCESS, w[r][j]);
      }
    }
  }
  if constexpr (CONV)
    if (live && rank == 0) convolution.shift(p, slot, i_h);

  // 7. Norm and gate
  if constexpr (TILES == 1) __syncthreads();
  else mbarrier_wait(shared_address(&memory.arrived), 0);
  float all[2] = {};  // in the same order whoever adds
  constexpr int AT_ONCE = Shape::SUMS % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int i = 0; i < Shape::SUMS; i += AT_ONCE) {
    if constexpr (AT_ONCE == 4) {
      const float4 x = *reinterpret_cast<const float4*>(&memory.squares[i]);
      all[i / 4 % 2] += (x.x + x.y) + (x.z + x.w);
    } else {
      all[0] += memory.squares[i];
    }
  }
  const float norm = rsqrtf(fmaf(all[0] + all[1], 1.f / V, p.norm_epsilon));
  const bool writes = (ROWS == 1 || lane < LANES / 2) && lane % COPIES == 0;
  const uint32_t row = i_bh * V + own;
  if constexpr (Call::SCALED) {
    float largest = 0.f;
    for (int i = 0; i < Shape::SUMS; ++i) largest = fmaxf(largest, memory.largest[i]);
    const float scale = fmaxf(live ? largest * norm : 0.f, LEAST_AMAX) / LARGEST_E4M3;
    if (tile == 0 && threadIdx.x == 0) p.output_scale[i_b * p.scale_row + i_hv * p.scale_head] = scale;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const float y = live ? o[pass] * norm * scaled(pass) / scale : 0.f;
      if (writes) reinterpret_cast<uint8_t*>(p.output)[row + pass * PASS] = ptx::to_e4m3(y);
    }
  } else if (writes) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const float y = o[pass] * norm * scaled(pass);
      p.output[row + pass * PASS] = __float2bfloat16(live ? y : 0.f);
    }
  }
#endif
}

#endif  // __CUDACC__

}  // namespace gdn
