// cuda-v5's kernel with the dots on the tensor cores, for batches large enough that instructions are scarce.
//
// Products of bfloat16 are exact in float32, where mma.sync adds them up: x = S k and y = S q lose nothing against FMAs. A
// dot product does not care in which order its terms come, so fragments are what lies in memory: four lanes have a row, and
// 16 bytes that a lane has loaded are its four registers of A, unmoved. Two of them stand for row i of A and two for row
// i + 8: both are the same row of S, at other places. Column n of B has k (n even) or q (n odd) at the places of the one or
// of the other (n / 2 odd), and of the accumulators half are what is wanted: the even lanes' of row i and the odd lanes' of
// row i + 8, which one exchange adds up. With k in A the same product gives z = k.q.
// Per row this takes 0.6 of the instructions of gdn_decode_v5, which unpacks each element for two FMAs.
// Provenance: as decode.cuh; fragments as in the PTX manual, "Matrix Fragments for mma.m16n8k16". Written here.
#pragma once

#include "decode.cuh"

namespace gdn {

#ifdef __CUDACC__

// c [16, 8] += a [16, 16] b [16, 8]; rows lane / 4 and lane / 4 + 8 of a and c, column lane / 4 of b.
__device__ __forceinline__ void mma_bf16(float* c, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// WORDS words of q or k, through L1.
template <int WORDS>
__device__ __forceinline__ void load_words(uint32_t* w, const __nv_bfloat16* p) {
#pragma unroll
  for (int i = 0; i < WORDS; i += 4) {
    const uint4 u = __ldg(reinterpret_cast<const uint4*>(p + 2 * i));
    w[i] = u.x, w[i + 1] = u.y, w[i + 2] = u.z, w[i + 3] = u.w;
  }
}

// Sum over a lane and its neighbour.
__device__ __forceinline__ float both(float x) { return x + __shfl_xor_sync(0xffffffffu, x, 1); }

// ROWS of each four lanes: 8 ROWS a warp.
template <int ROWS, int WARPS, int LOAD, int STORE, int RESIDENT>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT > WARPS ? RESIDENT / WARPS : 1)
gdn_decode_v5_mma(const __grid_constant__ Arguments<__nv_bfloat16> p) {
  using T = __nv_bfloat16;
  constexpr int LANES = 4, EACH = WIDEST / int(sizeof(T)), WORDS = EACH / 2, ACCESSES = K / LANES / EACH;
  constexpr int TILE = WARPS * 8 * ROWS, TILES = V / TILE;
  static_assert(V % TILE == 0, "a CTA stays in one head");

  constexpr uint32_t STRIDE = WARPS * 8, ROW = K * sizeof(T), ACCESS = LANES * EACH * sizeof(T);
  const uint32_t lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
  const uint64_t at = static_cast<uint64_t>(blockIdx.x) * (TILE * ROW) + (first * ROW + lane * EACH * sizeof(T));
  const char* from = reinterpret_cast<const char*>(p.state) + at;
  uint32_t w[ROWS][ACCESSES][WORDS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int j = 0; j < ACCESSES; ++j) load<WORDS * 4, LOAD>(w[r][j], from + r * STRIDE * ROW + j * ACCESS);
  if constexpr (LOAD == LOAD_FIRST)
    if (static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.state)) < 0) return;  // never: see decode.cuh

  const uint32_t i_bh = blockIdx.x / TILES;                               // batch * HV + value head
  const uint32_t i_h = p.by_group.divide(i_bh);                           // batch * H + query/key head
  const uint32_t i_hv = i_bh - p.by_HV.divide(i_bh) * p.HV;
  const T* pk = p.k + (i_h * K + lane * EACH);
  const T* pb = (first % 2 ? p.q : p.k) + (i_h * K + lane * EACH);        // this lane's column of B is first % 8
  const bool later = first % 4 >= 2;
  uint32_t k[ACCESSES][WORDS], column[ACCESSES][WORDS / 2];
#pragma unroll
  for (int j = 0; j < ACCESSES; ++j) {
    uint32_t b[WORDS];
    load_words<WORDS>(k[j], pk + j * LANES * EACH);
    load_words<WORDS>(b, pb + j * LANES * EACH);
#pragma unroll
    for (int i = 0; i < WORDS / 2; ++i) column[j][i] = later ? b[2 * i + 1] : b[2 * i];
  }
  const uint32_t own = blockIdx.x * TILE + first;                         // of all B * HV * V rows
  float v[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) v[r] = __bfloat162float(p.v[own + r * STRIDE]);
  const float x_gate = __bfloat162float(p.a[i_bh]) + p.dt_bias[i_hv];
  const float g = decay(p.A_log[i_hv], x_gate), beta = sigmoid(__bfloat162float(p.b[i_bh]));

  float xy[ROWS][4] = {}, kk[4] = {};
#pragma unroll
  for (int j = 0; j < ACCESSES; ++j)
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      mma_bf16(kk, k[j] + i, column[j] + i / 2);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) mma_bf16(xy[r], w[r][j] + i, column[j] + i / 2);
    }
  const bool odd = lane % 2;
  const float z = both(odd ? kk[3] : kk[1]);
  float d[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float x = both(odd ? xy[r][2] : xy[r][0]), y = both(odd ? xy[r][3] : xy[r][1]);
    d[r] = beta * (v[r] - g * x);
    if (lane == r) p.output[own + r * STRIDE] = __float2bfloat16(p.scale * (g * y + d[r] * z));
  }

  char* to = reinterpret_cast<char*>(p.new_state) + at;
#pragma unroll
  for (int j = 0; j < ACCESSES; ++j) {
    float key[EACH];
    unpack<EACH>(key, k[j], p.k);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float s[EACH];
      unpack<EACH>(s, w[r][j], p.state);
#pragma unroll
      for (int i = 0; i < EACH; ++i) s[i] = fmaf(d[r], key[i], g * s[i]);
      pack<EACH>(w[r][j], s, p.state);
      store<WORDS * 4, STORE>(to + r * STRIDE * ROW + j * ACCESS, w[r][j]);
    }
  }
}

// Four lanes to a row: this kernel.
template <int ROWS, int WARPS, int LOAD, int STORE, int RESIDENT>
struct Kernel<__nv_bfloat16, 4, ROWS, WARPS, LOAD, STORE, RESIDENT> {
  static constexpr auto function = gdn_decode_v5_mma<ROWS, WARPS, LOAD, STORE, RESIDENT>;
};

#endif  // __CUDACC__

}  // namespace gdn
