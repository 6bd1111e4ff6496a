// What a decode layer does after its convolution, in one launch: up to 8 tokens of the gated delta rule for each sequence, as mtp.cuh has
// it, and of their outputs the RMSNorm with its gate:
//
//   y = o rsqrt(sum(o^2) / V + epsilon) weight silu(z)     o [V] of a head, rounded to bfloat16; or sigmoid(z)
//
// A head's sum of squares needs all its rows. They are in one CTA, or in a cluster of 2 to 8, so that small batches fill the GPU as well.
// Each group of warps sends its rows' sums, one number for each token, to all CTAs of the cluster, its own among them, by stores that
// count for a barrier there (st.async); one instruction for all. Then it writes the states, and only then waits: what the sums take on
// their way costs nothing.
//
// Why a CTA is there as long as others write to it: its barrier expects the bytes of all groups of the cluster, and a warp of its own
// waits for them before it ends. Before the first of them is sent, all CTAs have begun and initialised their barriers: all threads
// arrive at a barrier of the cluster, and who sends waits for it. A row of padding sends nothing; all CTAs of its head see the same slot.
// Provenance: as mtp.cuh. The call is vLLM's; written here.
#pragma once

#include "cluster.cuh"
#include "mtp.cuh"
#include "wgmma_tokens.cuh"

namespace gdn {

// Strides as MtpArguments has them.
struct LayerArguments : MtpArguments {
  const __nv_bfloat16* z;      // [.., HV, V]
  const void* norm_weight;     // [V] float or bfloat16
  int32_t z_batch, z_token;
  float norm_epsilon;          // under the root, added to the mean square
  bool weight_bf16, sigmoid;   // sigmoid: of z; else silu
};

#ifdef __CUDACC__

template <int TOKENS, int ROWS>
struct Sums {  // shared
  uint64_t arrived;
  float of_rows[V / ROWS][TOKENS];
};

// Outputs normalised and gated. CTAS: of a head. The barrier SUMS is the last of 16.
template <int TOKENS, int ROWS, int GROUPS, int CTAS>
class NormedOutputs {
  static constexpr int N = TOKENS / 4, HALVES = ROWS / 8, SUMS = 15;
  static constexpr uint32_t ALL = 0xffffffffu;
  Sums<TOKENS, ROWS>& sums;
  uint32_t z[N][HALVES], weight[HALVES], weight_low[HALVES];
  float kept[N][HALVES], squares[N];

 public:
  __device__ __forceinline__ explicit NormedOutputs(Sums<TOKENS, ROWS>& sums) : sums(sums) {}

  // Called by one warp, and `join` by all others.
  __device__ __forceinline__ void begin(uint32_t lane) {
#if FLASHCORE_COPY_ENGINE
    if constexpr (CTAS > 1) {
      if (lane == 0) {
        const uint32_t barrier = shared_address(&sums.arrived);
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect_tx(barrier, sizeof sums.of_rows);
        mbarrier_init_fence();
      }
      __syncwarp();
    }
#endif
    join();
  }
  __device__ __forceinline__ void join() {
#if FLASHCORE_COPY_ENGINE
    if constexpr (CTAS > 1) flashcore::cluster_arrive_only();
#endif
  }

  // `tile`: the group's first row in the head.
  __device__ __forceinline__ void ask(const LayerArguments& p, uint32_t i_b, uint32_t i_hv, int begin, int count, uint32_t tile,
                                      uint32_t lane) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const uint32_t row = tile + lane / 4 + 8 * h;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int t = max(begin + min(4 * j + int(lane % 4), count - 1), 0);
        ptx::load_now<2>(&z[j][h], of_token(p.z, i_b, p.z_batch, p.z_token, t, i_hv * V + row));
      }
      const char* const at = static_cast<const char*>(p.norm_weight) + (row << (p.weight_bf16 ? 1 : 2));
      ptx::load_now<2>(&weight[h], at + (p.weight_bf16 ? 0 : 2));  // a bfloat16 is the upper half of a float
      ptx::load_now<2>(&weight_low[h], at);
    }
    if (p.weight_bf16)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) weight_low[h] = 0;
  }

  __device__ __forceinline__ void take(int j, const float (&o)[HALVES], __nv_bfloat16*, int64_t, int, uint32_t) {
    squares[j] = 0.f;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      kept[j][h] = __bfloat162float(__float2bfloat16(o[h]));
      squares[j] = fmaf(kept[j][h], kept[j][h], squares[j]);
    }
#pragma unroll
    for (int m = 4; m < 32; m *= 2) squares[j] += __shfl_xor_sync(ALL, squares[j], m);
  }
  __device__ __forceinline__ void send(uint32_t tile, uint32_t lane) {
    if constexpr (CTAS == 1) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (lane < 4) sums.of_rows[tile / ROWS][4 * j + lane] = squares[j];
    } else {
#if FLASHCORE_COPY_ENGINE
      flashcore::cluster_wait();
#pragma unroll
      for (int j = 0; j < N; ++j) {
        // lane l: the sum of token l % 4 to CTA l / 4
        const int to = static_cast<int>(lane / 4);
        float* const at = &sums.of_rows[tile / ROWS][4 * j + lane % 4];
        if (to < CTAS)
          store_at_peer(at_peer(shared_address(at), to), __float_as_uint(squares[j]), at_peer(shared_address(&sums.arrived), to));
      }
#endif
    }
  }

  __device__ __forceinline__ void end(const LayerArguments& p, __nv_bfloat16* output, int64_t token, int count, uint32_t lane) {
    if constexpr (CTAS == 1) named_barrier_sync<GROUPS * 32>(SUMS);
#if FLASHCORE_COPY_ENGINE
    if constexpr (CTAS > 1) mbarrier_wait(shared_address(&sums.arrived), 0);
#endif
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int t = 4 * j + lane % 4;
      // of rows lane / 4 and + 8 of the sums; in the same order whoever has them
      float square = sums.of_rows[lane / 4][t];
      if constexpr (V / ROWS == 16) square += sums.of_rows[lane / 4 + 8][t];
#pragma unroll
      for (int m = 4; m < 32; m *= 2) square += __shfl_xor_sync(ALL, square, m);
      const float norm = rsqrtf(fmaf(square, 1.f / V, p.norm_epsilon));
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const float x = low(z[j][h]), gate = p.sigmoid ? sigmoid(x) : x * sigmoid(x);
        const float scaled = __uint_as_float(weight[h] << 16 | weight_low[h]) * gate;
        if (t < count) output[t * token + lane / 4 + 8 * h] = __float2bfloat16(kept[j][h] * norm * scaled);
      }
    }
  }
};

template <typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS>
struct LayerMemory {
  typename Shape<T, TOKENS, true, ROWS, SPLIT, GROUPS>::Memory rows;
  Sums<TOKENS, ROWS> sums;
};

// A cluster has the CTAs of a head. All states are written: MtpArguments' mode is not OUTPUTS.
template <typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS, int LOAD, int STORE, int RESIDENT>
__global__ void __launch_bounds__((SPLIT * GROUPS + 1) * 32,
                                  RESIDENT > SPLIT * GROUPS + 1 ? RESIDENT / (SPLIT * GROUPS + 1) : 1)
gdn_layer_post_conv(const __grid_constant__ LayerArguments p) {
  using S = Shape<T, TOKENS, true, ROWS, SPLIT, GROUPS>;
  static_assert(S::TILES <= 8 && 2 * V / ROWS >= 16 && V / ROWS <= 16);
  // Compiled for an architecture without clusters, kernels that need one are empty; the host does not launch them there.
  if constexpr (S::TILES == 1 || FLASHCORE_COPY_ENGINE) {
    auto& memory = *reinterpret_cast<LayerMemory<T, TOKENS, ROWS, SPLIT, GROUPS>*>(shared_memory());
    NormedOutputs<TOKENS, ROWS, GROUPS, S::TILES> outputs(memory.sums);
    verify_rows<S, T, TOKENS, true, ROWS, SPLIT, GROUPS, LOAD, STORE, false, __nv_bfloat16>(p, memory.rows, outputs);
  }
}

#endif  // __CUDACC__

}  // namespace gdn
