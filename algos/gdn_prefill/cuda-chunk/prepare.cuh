// All chunks at once: gates, their sums, (I + A)^-1 and the masked q k^T of the value heads. A CTA of eight warps has a chunk,
// a query/key head and gridDim.z-th parts of its value heads, two at a time: all of them where there are chunks enough, one
// where there are few. Warps 0 to 3 have 16 rows of k k^T each, and make T of it; warps 4 to 7 have, the other way round so
// that a quarter of the SM has five blocks of products, 16 rows of q k^T, which are M but for the gates, and make the gates.
//
// (I + A)^-1: in float the four 16 x 16 blocks on the diagonal by substitution, a column to each lane; then, with products
// of tf32, T_10 and T_32, and then rows 2 and 3, each T_ij = -(T_ii A_ij) T_jj of blocks or of two by two of them. An
// accumulator is the next product's left operand: nothing of a row is asked of another warp.
#pragma once

#include "chunk.cuh"
#include "gates.cuh"

namespace gdn {

constexpr int PREPARE_THREADS = 256;
constexpr int PAIR = 2;                   // value heads at a time
constexpr int A_ROW = CHUNK + 4;          // floats: rows 2t of a column g lie in different banks

// e^(G_t - G_s), of t in a block of 16 and s before it, is e^(G_t - G_u) e^(G_u - G_s) with u the last token before the
// block: both at most 1, and a token has few of each.
struct Gates {
  float G[CHUNK];                         // sums of log2 g
  float beta[CHUNK];
  float left[CHUNK];                      // e^(G_t - G_u)
  float right[3][CHUNK - SIDE];           // e^(G_u - G_s), u before block 1, 2, 3
};

struct PrepareShared {
  union {
    struct { char k[D_TILE], q[D_TILE]; };
    float A[PAIR][CHUNK][A_ROW];          // when these have been read, and T in its place
  };
  Gates gates[2][PAIR];
  int begin, count;                       // the chunk's first token, and how many
};

// Not below -64: what is left then is nothing beside any other number, and differences of sums of 64 such keep an error
// below 2e-4, a 20th of what bf16 costs.
constexpr float LEAST = -64.f;

// The raw gates of tokens 2 lane and 2 lane + 1 of a value head.
struct Raw {
  float A_log = 0.f, dt_bias = 0.f;
  __nv_bfloat16 a[2] = {}, b[2] = {};
  __device__ __forceinline__ void ask_head(const Prefill& p, int hv) { A_log = p.A_log[hv], dt_bias = p.dt_bias[hv]; }
  __device__ __forceinline__ void ask_tokens(const Prefill& p, int begin, int count, int hv, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (2 * lane + i < count) {
        const int64_t at = (begin + 2 * lane + i) * static_cast<int64_t>(p.HV) + hv;
        a[i] = p.a[at], b[i] = p.b[at];
      }
  }
};

__device__ __forceinline__ void put_pair(void* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }

// A warp makes the gates of a value head: of tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void make_gates(Gates& to, Prepared& out, const Raw& raw, int count, int lane) {
  float G[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = 2 * lane + i < count;
    G[i] = there ? fmaxf(log2_decay(raw.A_log, __bfloat162float(raw.a[i]) + raw.dt_bias), LEAST) : 0.f;
    beta[i] = there ? sigmoid(__bfloat162float(raw.b[i])) : 0.f;
  }
  G[1] += G[0];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_sync(0xffffffffu, G[1], lane - (lane < d ? 0 : d));
    if (lane >= d) G[0] += before, G[1] += before;
  }
  put_pair(to.G + 2 * lane, G[0], G[1]), put_pair(to.beta + 2 * lane, beta[0], beta[1]);
  float own = 0.f;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const float u = __shfl_sync(0xffffffffu, G[1], i * 8 - 1);
    if (lane / 8 == i) own = u;
    if (lane / 8 < i) put_pair(to.right[i - 1] + 2 * lane, exp2_approx(u - G[0]), exp2_approx(u - G[1]));
  }
  put_pair(to.left + 2 * lane, exp2_approx(G[0] - own), exp2_approx(G[1] - own));
  const float end = __shfl_sync(0xffffffffu, G[1], 31);
  put_pair(out.T + gate_at(IN, 2 * lane), exp2_approx(G[0]), exp2_approx(G[1]));
  put_pair(out.T + gate_at(OUT, 2 * lane), exp2_approx(end - G[0]), exp2_approx(end - G[1]));
  put_pair(out.T + gate_at(BETA, 2 * lane), beta[0], beta[1]);
}

// d = X K^T: X 16 rows of a tile from `left` on, K the first N blocks of 16 rows of the other.
template <int N>
__device__ __forceinline__ void products(float (&d)[4][2][4], uint32_t left, uint32_t right, int lane) {
  left += in_tile<D_PIECES>(lane % 16, lane / 16), right += in_tile<D_PIECES>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll 4
  for (int step = 0; step < D / 16; ++step) {
    uint32_t x[4];
    load_matrices(x, left ^ step * 32);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      uint32_t y[4];  // both n-tiles of 8 tokens
      load_matrices(y, (right ^ step * 32) + j * SIDE * D * 2);
      multiply_add(d[j][0], x, y[0], y[1]);
      multiply_add(d[j][1], x, y[2], y[3]);
    }
  }
}

// Blocks as accumulators, and as the left operands of two products that take column 2t where the instruction says t, and
// 2t + 1 where it says t + 4: the order of a sum is free.
using Block = float[2][4];
using Left = uint32_t[2][4];

// x = e^(G_t - G_s) by[t] d of block (i, j), j < i.
__device__ __forceinline__ void weigh(Block& x, const Block& d, const Gates& gates, const float (&by)[2],
                                      int i, int j, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float2 right = *reinterpret_cast<const float2*>(gates.right[i - 1] + j * SIDE + e * 8 + lane % 4 * 2);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[e][c] = by[c / 2] * (c % 2 ? right.y : right.x) * d[e][c];
  }
}
// The same of block (i, i), for s up to t - `strict`; zeros behind.
__device__ __forceinline__ void weigh_diagonal(Block& x, const Block& d, const Gates& gates,
                                               const float (&by)[2], int i, int strict, int lane) {
  const int g = lane / 4, t = lane % 4;
  const float G[2] = {gates.G[i * SIDE + g], gates.G[i * SIDE + g + 8]};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float2 before = *reinterpret_cast<const float2*>(gates.G + i * SIDE + e * 8 + 2 * t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = g + c / 2 * 8, column = e * 8 + 2 * t + c % 2;
      const float value = by[c / 2] * exp2_approx(G[c / 2] - (c % 2 ? before.y : before.x)) * d[e][c];
      x[e][c] = column + strict <= row ? value : 0.f;
    }
  }
}

// Block (i, j) as bf16 to a matrix in global memory: neighbours swap, so that 32 whole bytes of a row are stored at once.
__device__ __forceinline__ void put_block(char* matrix, const Block& x, int i, int j, int lane) {
  const bool odd = lane % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t low = pack(x[0][2 * half], x[0][2 * half + 1]), high = pack(x[1][2 * half], x[1][2 * half + 1]);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    const uint2 words = {odd ? other : low, odd ? high : other};
    *reinterpret_cast<uint2*>(matrix + in_matrix(i * SIDE + half * 8 + lane / 4, 2 * j + odd) + lane % 4 / 2 * 8) = words;
  }
}

// Block (i, j) of a matrix in global memory.
__device__ __forceinline__ void put_zeros(char* matrix, int i, int j, int lane) {
  *reinterpret_cast<uint4*>(matrix + in_matrix(i * SIDE + lane / 2, 2 * j + lane % 2)) = {0, 0, 0, 0};
}

__device__ __forceinline__ void load_block(Block& d, const float* block, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = *reinterpret_cast<const float2*>(block + (lane / 4 + half * 8) * A_ROW + e * 8 + lane % 4 * 2);
      d[e][2 * half] = pair.x, d[e][2 * half + 1] = pair.y;
    }
}
__device__ __forceinline__ void store_block(float* block, const Block& d, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      put_pair(block + (lane / 4 + half * 8) * A_ROW + e * 8 + lane % 4 * 2, d[e][2 * half], d[e][2 * half + 1]);
}
// Row I of blocks: of A to shared memory, or of M to global memory.
template <int I>
__device__ __forceinline__ void weigh_row(float* A, char* M, const float (&d)[4][2][4], const Gates& gates, float scale,
                                          bool keys, int lane) {
  const int row = I * SIDE + lane / 4;
  float by[2] = {scale, scale};
  if (keys) by[0] = gates.beta[row], by[1] = gates.beta[row + 8];
  Block x;
  const auto put = [&](int j) {
    if (keys) store_block(A + j * SIDE, x, lane);
    else put_block(M, x, I, j, lane);
  };
  weigh_diagonal(x, d[I], gates, by, I, keys, lane);
  put(I);
  by[0] *= gates.left[row], by[1] *= gates.left[row + 8];
#pragma unroll
  for (int j = 0; j < I; ++j) {
    weigh(x, d[j], gates, by, I, j, lane);
    put(j);
  }
#pragma unroll
  for (int j = I + 1; j < 4; ++j)
    if (!keys) put_zeros(M, I, j, lane);
}

__device__ __forceinline__ void as_left(Left& a, const Block& d, float sign = 1.f) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int c = 0; c < 4; ++c) a[e][c] = tf32(sign * d[e][c % 2 * 2 + c / 2]);
}
// d += a B, B in shared memory.
__device__ __forceinline__ void add_product(Block& d, const Left& a, const float* block, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* b = block + (e * 8 + lane % 4 * 2) * A_ROW + n * 8 + lane / 4;
      multiply_add_tf32(d[n], a[e], tf32(b[0]), tf32(b[A_ROW]));
    }
}

// The 16 x 16 blocks 2 half and 2 half + 1 on the diagonal of A become those of T: column lane % 16, from the top.
__device__ __forceinline__ void invert_diagonal(float (&A)[CHUNK][A_ROW], int half, int lane) {
  const int at = (2 * half + lane / SIDE) * SIDE, column = lane % SIDE;
  float* const block = &A[at][at];
  float y[SIDE];
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    float value = r == column ? 1.f : 0.f;
#pragma unroll
    for (int c = 0; c < r; c += 4) {
      const float4 a = *reinterpret_cast<const float4*>(block + r * A_ROW + c);
      value = fmaf(-a.x, y[c], value);
      if (c + 1 < r) value = fmaf(-a.y, y[c + 1], value);
      if (c + 2 < r) value = fmaf(-a.z, y[c + 2], value);
      if (c + 3 < r) value = fmaf(-a.w, y[c + 3], value);
    }
    y[r] = value;
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < SIDE; ++r) block[r * A_ROW + column] = y[r];
  __syncwarp();
}

// The blocks below, and all of T to global memory: by two warps, of which the one has rows 0 to 2 and the other row 3.
__device__ __forceinline__ void invert(float (&A)[CHUNK][A_ROW], char* T, int half, int barrier, int lane) {
  const auto block = [&](int i, int j) { return &A[i * SIDE][j * SIDE]; };
  invert_diagonal(A, half, lane);
  const int i = 1 + 2 * half;                  // T_10 or T_32
  Left left, more;
  {
    Block own, N = {}, below = {};
    load_block(own, block(i, i), lane);
    put_block(T, own, i, i, lane);
    as_left(left, own);
    add_product(N, left, block(i, i - 1), lane);
    as_left(more, N, -1.f);
    add_product(below, more, block(i - 1, i - 1), lane);
    put_block(T, below, i, i - 1, lane);
    put_zeros(T, i - 1, i, lane);
    if (half) {
      as_left(more, below);
    } else {
      store_block(block(1, 0), below, lane);
      load_block(own, block(0, 0), lane);
      put_block(T, own, 0, 0, lane);
    }
  }
  meet<64>(barrier);
  lane = thread_again() % 32;
  const int row = 2 + half;
  if (!half) {
    Block own;
    load_block(own, block(2, 2), lane);
    put_block(T, own, 2, 2, lane);
    as_left(left, own);
  }
  Block result = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    Block N = {};
    if (half) add_product(N, more, block(2, j), lane);
    add_product(N, left, block(row, j), lane);
    Left rest;
    as_left(rest, N, -1.f);
    add_product(result, rest, block(j, 0), lane);
    if (j == 1) {
      put_block(T, result, row, 0, lane);
      Block last = {};
      add_product(last, rest, block(1, 1), lane);
      put_block(T, last, row, 1, lane);
    }
  }
}

// MORE: a CTA has more than PAIR value heads, and keeps the products for them.
template <bool MORE>
__global__ void __launch_bounds__(PREPARE_THREADS, MORE ? 2 : 4) gdn_prefill_prepare(const __grid_constant__ Prefill p) {
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(shared_memory());
  const int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  const int64_t number = blockIdx.x, stride = static_cast<int64_t>(p.H) * D;
  const int h = blockIdx.y, group = p.HV / p.H;
  // Members of the group from blockIdx.z on, in steps of gridDim.z.
  const auto member_head = [&](int member) { return static_cast<int>(blockIdx.z) + member * static_cast<int>(gridDim.z); };
  const auto there = [&](int member) { return member_head(member) < group; };
  const auto head = [&](int member) { return h * group + member_head(member); };
  const auto result = [&](int member) -> Prepared& {
    return reinterpret_cast<Prepared*>(p.prepared)[number * p.HV + head(member)];
  };
  const bool gating = warp / PAIR == 2 && there(warp % PAIR);
  if (gating) prefetch(p.A_log + head(warp % PAIR)), prefetch(p.dt_bias + head(warp % PAIR));
  // A sequence alone and few chunks: the rows can be fetched into L2 before cu_seqlens is there.
  if (const int64_t row = number * CHUNK + thread / 4; p.N == 1 && gridDim.x < 64 && row < p.T) {
    prefetch((thread & 2 ? p.q : p.k) + row * stride + h * D + thread % 2 * 64);
    if (thread % 4 < 2) prefetch((thread % 2 ? p.a : p.b) + row * p.HV + h * group);
  }

  const int n = sequence_of(p, number, CHUNK, lane);
  const int64_t index = number - p.border(n) / CHUNK - n, from = p.border(n) + index * CHUNK, left = p.border(n + 1) - from;
  if (index < 0 || left <= 0) return;
  const int begin = static_cast<int>(from);  // q of 2^31 tokens would be 512 GiB
  const int count = left < CHUNK ? static_cast<int>(left) : CHUNK;

  Raw raw;
  if (gating) raw.ask_head(p, head(warp % PAIR)), raw.ask_tokens(p, begin, count, head(warp % PAIR), lane);
  if (thread == 0) s.begin = begin, s.count = count;
  {
    const int row = thread / D_PIECES, piece = thread % D_PIECES;
    const uint32_t to = shared_address(s.k) + in_tile<D_PIECES>(row, piece);
    const int64_t at = (from + row) * stride + h * D + piece * 8, step = PREPARE_THREADS / D_PIECES * stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = row + i * (PREPARE_THREADS / D_PIECES) < count;
      copy16(to + i * PREPARE_THREADS * 16, p.k + at + i * step, inside);
      copy16(to + D_TILE + i * PREPARE_THREADS * 16, p.q + at + i * step, inside);
    }
    commit_copies();
  }
  if (gating)
    make_gates(s.gates[0][warp % PAIR], result(warp % PAIR), raw, count, lane);
  wait_for_copies<0>();
  __syncthreads();

  // Warps 0 to 3: k k^T, from above; warps 4 to 7: q k^T, from below. Blocks up to the diagonal.
  const bool keys = warp < 4;
  const int i = keys ? warp : 7 - warp;
  const uint32_t k_tile = shared_address(s.k), rows = k_tile + (keys ? 0 : D_TILE) + i * SIDE * D * 2;
  float d[4][2][4] = {};
  if (i == 0) products<1>(d, rows, k_tile, lane);
  if (i == 1) products<2>(d, rows, k_tile, lane);
  if (i == 2) products<3>(d, rows, k_tile, lane);
  if (i == 3) products<4>(d, rows, k_tile, lane);

#pragma unroll 1
  for (int pair = 0; MORE ? there(pair * PAIR) : pair < 1; ++pair) {
    __syncthreads();  // the tiles have been read, or the gates are there and A is free
    const int these = there(pair * PAIR + 1) ? PAIR : 1;
    const Gates* const gates = s.gates[pair % 2];
#pragma unroll 1
    for (int m = 0; m < these; ++m) {
      float* const A = &s.A[m][i * SIDE][0];
      char* const M = result(pair * PAIR + m).M;
      const int lane = thread_again() % 32;  // so that no address waits in a register
      if (i == 0) weigh_row<0>(A, M, d, gates[m], p.scale, keys, lane);
      if (i == 1) weigh_row<1>(A, M, d, gates[m], p.scale, keys, lane);
      if (i == 2) weigh_row<2>(A, M, d, gates[m], p.scale, keys, lane);
      if (i == 3) weigh_row<3>(A, M, d, gates[m], p.scale, keys, lane);
    }
    if (keys) {
      meet<128>(1);
      const int m = warp / 2;
      if (m < these) invert(s.A[m], result(pair * PAIR + m).T, warp % 2, 2 + m, thread_again() % 32);
    } else if (MORE && warp / PAIR == 2) {
      const int next = (pair + 1) * PAIR + warp % PAIR;
      if (there(next)) {
        const int lane = thread_again() % 32;
        Raw raw;
        raw.ask_head(p, head(next)), raw.ask_tokens(p, s.begin, s.count, head(next), lane);
        make_gates(s.gates[(pair + 1) % 2][warp % PAIR], result(next), raw, s.count, lane);
      }
    }
  }
}

}  // namespace gdn
