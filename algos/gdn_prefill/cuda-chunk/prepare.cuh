// All chunks at once: gates, their sums, (I + A)^-1 and the masked q k^T of the value heads. A CTA of four warps has a chunk,
// a query/key head and gridDim.z-th parts of its value heads: all of them where there are chunks enough, one where there are
// few. A warp has 16 rows of A and T, and for balance the 16 rows of M that stand as far from the other end.
//
// (I + A)^-1 in float: the four 16 x 16 blocks on the diagonal by substitution, a column to each lane, then row after row of
// blocks, T_ij = -T_ii sum_u A_iu T_uj. These products are of bf16 in two parts (x = high + low, three products), which
// leaves 16 bits; the result is rounded to bf16 once, at the end.
#pragma once

#include "chunk.cuh"
#include "gates.cuh"

namespace gdn {

constexpr int PREPARE_THREADS = 128;

struct PrepareShared {
  char k[D_TILE], q[D_TILE];
  float G[CHUNK];                         // sums of log2 g
  float beta[CHUNK];
  float A[4][SIDE][SIDE + 1];             // the blocks on the diagonal
  float T[BLOCKS][SIDE][SIDE + 1];
  int sequence;
  float half;                             // G[31]
};

// Not below -64: what is left then is nothing beside any other number, and differences of sums of 64 such keep an error
// below 2e-4, a 20th of what bf16 costs.
constexpr float LEAST = -64.f;

// A 16 x 16 block as a sum of three, so that the products of the parts do not wait for each other.
struct Sum {
  float parts[3][2][4] = {};
  __device__ __forceinline__ void add(const uint32_t (&a_high)[4], const uint32_t (&a_low)[4], const Parts (&b)[2][2]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_add(parts[0][n], a_high, b[n][0].high, b[n][1].high);
      multiply_add(parts[1][n], a_high, b[n][0].low, b[n][1].low);
      multiply_add(parts[2][n], a_low, b[n][0].high, b[n][1].high);
    }
  }
  __device__ __forceinline__ float operator()(int n, int c) const { return parts[0][n][c] + (parts[1][n][c] + parts[2][n][c]); }
};

__global__ void __launch_bounds__(PREPARE_THREADS, 2) gdn_prefill_prepare(const __grid_constant__ Prefill p) {
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(shared_memory());
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int64_t number = blockIdx.x;
  const int h = blockIdx.y, group = p.HV / p.H;

  const int n = sequence_of(p, number, CHUNK, &s.sequence, thread, PREPARE_THREADS);
  const int64_t index = number - p.border(n) / CHUNK - n, begin = p.border(n) + index * CHUNK, left = p.border(n + 1) - begin;
  if (index < 0) return;
  if (left <= 0) return;
  const int count = left < CHUNK ? static_cast<int>(left) : CHUNK;

  const uint32_t k_tile = shared_address(s.k), q_tile = shared_address(s.q);
  const int64_t stride = static_cast<int64_t>(p.H) * D;
  copy_tile<D_PIECES>(k_tile, p.k + begin * stride + h * D, stride, count, thread, PREPARE_THREADS);
  copy_tile<D_PIECES>(q_tile, p.q + begin * stride + h * D, stride, count, thread, PREPARE_THREADS);
  commit_copies();
  // the gates of a value head are asked for one ahead
  float A_log = 0.f, x = 0.f, b = 0.f;
  const auto ask = [&](int member) {
    if (member < group && thread < count && thread < CHUNK) {
      const int hv = h * group + member;
      const int64_t at = (begin + thread) * p.HV + hv;
      A_log = p.A_log[hv], x = __bfloat162float(p.a[at]) + p.dt_bias[hv], b = __bfloat162float(p.b[at]);
    }
  };
  ask(blockIdx.z);
  wait_for_copies<0>();
  __syncthreads();

  // k k^T of rows 16 warp on, and q k^T of rows 16 other on: blocks up to the diagonal.
  const int other = 3 - warp;
  float kk[4][2][4] = {}, qk[4][2][4] = {};
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t k_left[4], q_left[4];
    const int row = (lane / 8 % 2) * 8 + lane % 8, piece = 2 * step + lane / 16;
    load_matrices(k_left, k_tile + in_tile<D_PIECES>(warp * 16 + row, piece));
    load_matrices(q_left, q_tile + in_tile<D_PIECES>(other * 16 + row, piece));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > warp && j > other) continue;
      uint32_t right[4];  // both n-tiles of 8 tokens
      load_matrices(right, k_tile + in_tile<D_PIECES>(j * 16 + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j <= warp) multiply_add(kk[j][e], k_left, right[2 * e], right[2 * e + 1]);
        if (j <= other) multiply_add(qk[j][e], q_left, right[2 * e], right[2 * e + 1]);
      }
    }
  }

#pragma unroll 1
  for (int member = blockIdx.z; member < group; member += gridDim.z) {
    const int hv = h * group + member;
    Prepared& to = reinterpret_cast<Prepared*>(p.prepared)[number * p.HV + hv];
    float G = 0.f;
    if (thread < CHUNK) {
      G = thread < count ? fmaxf(log2_decay(A_log, x), LEAST) : 0.f;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float before = __shfl_sync(0xffffffffu, G, lane - (lane < d ? 0 : d));
        G += lane < d ? 0.f : before;
      }
      if (thread == 31) s.half = G;
      s.beta[thread] = thread < count ? sigmoid(b) : 0.f;
    }
    ask(member + gridDim.z);
    __syncthreads();
    if (thread < CHUNK) s.G[thread] = G += thread < 32 ? 0.f : s.half;
    __syncthreads();
    if (thread < CHUNK) {
      to.in[thread] = exp2_approx(G);
      to.out[thread] = exp2_approx(s.G[CHUNK - 1] - G);
      to.beta[thread] = s.beta[thread];
    }

    // A: left of the diagonal it goes on as registers, the block on the diagonal to shared memory. M is done.
    float A[3][2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = j * 16 + e * 8 + 2 * t;
        if (j <= warp) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int in_row = g + i / 2 * 8, row = warp * 16 + in_row, c = column + i % 2;
            const float value = c < row ? s.beta[row] * exp2_approx(s.G[row] - s.G[c]) * kk[j][e][i] : 0.f;
            if (j < 3) A[j][e][i] = value;
            if (j == warp) s.A[warp][in_row][c % 16] = value;
          }
        }
        if (j <= other) {
          float m[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = other * 16 + g + i / 2 * 8, c = column + i % 2;
            m[i] = c <= row ? p.scale * exp2_approx(s.G[row] - s.G[c]) * qk[j][e][i] : 0.f;
          }
          char* block = reinterpret_cast<char*>(to.M) + block_at(other, j);
          *reinterpret_cast<uint32_t*>(block + in_block(g, e) + 4 * t) = pack(m[0], m[1]);
          *reinterpret_cast<uint32_t*>(block + in_block(g + 8, e) + 4 * t) = pack(m[2], m[3]);
        }
      }
    }
    __syncwarp();

    // T_ii: column lane % 16, by substitution from the top.
    float y[SIDE];
#pragma unroll
    for (int r = 0; r < SIDE; ++r) y[r] = r == lane % SIDE ? 1.f : 0.f;
#pragma unroll
    for (int c = 0; c < SIDE - 1; ++c)
#pragma unroll
      for (int r = c + 1; r < SIDE; ++r) y[r] = fmaf(-s.A[warp][r][c], y[c], y[r]);
    const int own = warp * (warp + 1) / 2 + warp;
    if (lane < SIDE) {
#pragma unroll
      for (int r = 0; r < SIDE; ++r) s.T[own][r][lane] = y[r];
    }
    __syncthreads();

    // T_ij below: row after row of blocks, each by its warp.
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      if (warp == i) {
        uint32_t T_high[4], T_low[4];
        float ii[2][4];
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int c = 0; c < 4; ++c) ii[e][c] = -s.T[own][g + c / 2 * 8][e * 8 + 2 * t + c % 2];
        left_parts(T_high, T_low, ii);
#pragma unroll
        for (int j = 0; j < i; ++j) {
          Sum sum;
#pragma unroll
          for (int u = j; u < i; ++u) {
            uint32_t A_high[4], A_low[4];
            left_parts(A_high, A_low, A[u]);
            Parts right[2][2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const auto& T = s.T[u * (u + 1) / 2 + j];
                right[e][half] = parts(T[half * 8 + 2 * t][e * 8 + g], T[half * 8 + 2 * t + 1][e * 8 + g]);
              }
            sum.add(A_high, A_low, right);
          }
          Parts right[2][2];  // the sum, from an accumulator to a right operand: its 8 x 8 matrices transposed
#pragma unroll
          for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const Parts two = parts(sum(e, 2 * half), sum(e, 2 * half + 1));
              right[e][half] = {transposed(two.high), transposed(two.low)};
            }
          Sum T_ij;
          T_ij.add(T_high, T_low, right);
#pragma unroll
          for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int c = 0; c < 4; ++c) s.T[i * (i + 1) / 2 + j][g + c / 2 * 8][e * 8 + 2 * t + c % 2] = T_ij(e, c);
        }
      }
      __syncthreads();
    }

    for (int i = thread; i < BLOCKS * SIDE * 2; i += PREPARE_THREADS) {
      const int block = i / (SIDE * 2), row = i / 2 % SIDE, piece = i % 2;
      const float* from = &s.T[block][row][piece * 8];
      uint4 words = {pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7])};
      *reinterpret_cast<uint4*>(reinterpret_cast<char*>(to.T) + block * SIDE * SIDE * 2 + in_block(row, piece)) = words;
    }
    __syncthreads();  // G, beta and T are written again
  }
}

}  // namespace gdn
