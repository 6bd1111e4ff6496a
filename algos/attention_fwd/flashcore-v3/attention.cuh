// Attention forward, flashcore-v3: both products on the tensor cores, everything in between in registers.
//
// Changed from flashcore-v2:
//   - mma.sync m16n8k16: f16 in, f32 sums. A warp has 16 rows and all 64 keys of a tile. A lane's part of
//     S = Q K^T (two rows, columns 2t and 2t + 1 of each 8), rounded to f16, has the layout of the second product's
//     left operand: the probabilities never leave the registers. A row's maximum and sum are spread over the four lanes of
//     a quad, and found by two shuffles.
//   - Tiles stay f16 and are loaded by cp.async, 16 bytes per lane, the next one during the work on this one.
//   - Rows of a tile are 128 bytes, all 32 banks: row r stores its 16-byte piece c as piece c ^ (r % 8), so that the eight
//     rows of a matrix load are in eight different groups of banks.
//
// At (1, 8, 512, 64) on an H200, L2 cold: est. 6.5 to 7.5 us, 5 times less; 9.57 measured.
//
// Grid: x = block of 64 rows, y = head. CTA: 4 warps, warp w has rows 16 w onwards.
// Provenance: as flashcore-v2; registers from one product to the next as in FlashAttention-2 (arXiv 2307.08691).
// Written here.
#pragma once

#include "problem.cuh"
#include "mma_f16.cuh"

#ifdef __CUDACC__

namespace flashcore {

constexpr int V3_WARPS = 4, V3_ROWS = V3_WARPS * 16, V3_KEYS = 64, V3_STAGES = 2;
constexpr int V3_THREADS = V3_WARPS * 32;
constexpr int ROW = D * 2;                                   // bytes of a row
constexpr int V3_TILE = V3_KEYS * ROW;                       // bytes of a tile of keys, or of values
constexpr int V3_SHARED = V3_ROWS * ROW + 2 * V3_STAGES * V3_TILE;

// Rows first .. first + N of x, swizzled; zeros from S on.
template <int N>
__device__ __forceinline__ void load_tile(uint32_t to, const __half* x, int first, int S) {
  const int c = threadIdx.x % 8;
#pragma unroll
  for (int r = threadIdx.x / 8; r < N; r += V3_THREADS / 8)
    copy16(to + r * ROW + ((c ^ r % 8) << 4), x + (first + r) * D + c * 8, first + r < S);
}

__global__ void __launch_bounds__(V3_THREADS) flashcore_v3(const __grid_constant__ Problem p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * p.S * D;
  const int first = blockIdx.x * V3_ROWS, tiles = (p.S + V3_KEYS - 1) / V3_KEYS;
  const uint32_t q_tile = shared_address(shared_memory());
  const uint32_t k_tiles = q_tile + V3_ROWS * ROW, v_tiles = k_tiles + V3_STAGES * V3_TILE;

  load_tile<V3_ROWS>(q_tile, p.q + head, first, p.S);
  load_tile<V3_KEYS>(k_tiles, p.k + head, 0, p.S);
  load_tile<V3_KEYS>(v_tiles, p.v + head, 0, p.S);
  commit_copies();

  // A lane's address for a matrix load of 16 rows x 16 columns: as a left operand, or as the right operand of P V, matrices
  // 0, 1 are the upper and lower 8 rows; as the right operand of Q K^T they are the left and right 8 columns.
  const int r = lane % 8, half = lane / 8 % 2, other = lane / 16;
  const uint32_t down = (half * 8 + r) * ROW + ((other ^ r) << 4);
  const uint32_t across = (other * 8 + r) * ROW + ((half ^ r) << 4);

  uint32_t q[D / 16][4];
  float o[D / 8][4] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f};  // of rows g and g + 8; l: this lane's part of it

  for (int i = 0; i < tiles; ++i) {
    const int next = i + 1, stage = i % V3_STAGES;
    if (next < tiles) {
      load_tile<V3_KEYS>(k_tiles + next % V3_STAGES * V3_TILE, p.k + head, next * V3_KEYS, p.S);
      load_tile<V3_KEYS>(v_tiles + next % V3_STAGES * V3_TILE, p.v + head, next * V3_KEYS, p.S);
    }
    commit_copies();  // an empty group after the last tile keeps the count below right
    wait_for_copies<1>();
    __syncthreads();
    if (i == 0) {
#pragma unroll
      for (int c = 0; c < D / 16; ++c) load_matrices(q[c], (q_tile + warp * 16 * ROW + down) ^ (c << 5));
    }

    float s[V3_KEYS / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
#pragma unroll
      for (int n = 0; n < V3_KEYS / 16; ++n) {
        uint32_t k[4];
        load_matrices(k, ((k_tiles + stage * V3_TILE + across) ^ (c << 5)) + n * 16 * ROW);
        multiply_add(s[2 * n], q[c], k[0], k[1]);
        multiply_add(s[2 * n + 1], q[c], k[2], k[3]);
      }
    }

    if ((i + 1) * V3_KEYS > p.S) {
#pragma unroll
      for (int n = 0; n < V3_KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (i * V3_KEYS + n * 8 + 2 * t + e % 2 >= p.S) s[n][e] = -INFINITY;
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = m[h];
#pragma unroll
      for (int n = 0; n < V3_KEYS / 8; ++n) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float a = __expf((m[h] - most) * SCALE);  // a tile's first key is never masked: most is finite
      m[h] = most, l[h] *= a;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) o[n][2 * h] *= a, o[n][2 * h + 1] *= a;
#pragma unroll
      for (int n = 0; n < V3_KEYS / 8; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          s[n][e] = __expf((s[n][e] - most) * SCALE);
          l[h] += s[n][e];
        }
    }

#pragma unroll
    for (int c = 0; c < V3_KEYS / 16; ++c) {
      const uint32_t probabilities[4] = {pack(s[2 * c][0], s[2 * c][1]), pack(s[2 * c][2], s[2 * c][3]),
                                         pack(s[2 * c + 1][0], s[2 * c + 1][1]), pack(s[2 * c + 1][2], s[2 * c + 1][3])};
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t v[4];
        load_transposed(v, ((v_tiles + stage * V3_TILE + down) ^ (n << 5)) + c * 16 * ROW);
        multiply_add(o[2 * n], probabilities, v[0], v[1]);
        multiply_add(o[2 * n + 1], probabilities, v[2], v[3]);
      }
    }
    __syncthreads();  // the tile may be overwritten
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
    const float inverse = 1.f / l[h];
    const int row = first + warp * 16 + h * 8 + g;
    if (row < p.S) {
      __half2* output = reinterpret_cast<__half2*>(p.output + head + row * D);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        output[n * 4 + t] = to_half2(o[n][2 * h] * inverse, o[n][2 * h + 1] * inverse);
    }
  }
}

}  // namespace flashcore

#endif  // __CUDACC__
