// From chunk to chunk on Hopper: state.cuh's arithmetic with a warpgroup's products (wgmma), for 64 rows of V.
//
//   R = beta (V - e^G K S^T),   D = T R,   O = scale e^G Q S^T + M D,   S' = e^(G_C) S + D^T (e^(G_C - G) K)
//
// S^T never exists: the state's 64 rows are the left operand, in registers, of S K^T and S Q^T; what these leave in the
// accumulators is, packed to bf16, what the next product takes on its left (state.cuh). The tiles come by the copy engine, as
// it swizzles them, up to STAGES - 1 chunks ahead. Products are in flight while others' results are packed, in this order:
//
//   tensor core   S K^T | S Q^T, first half | R T^T | S Q^T, second half | D^T K       | D M^T
//   meanwhile            R                           D packed, S decayed   O decayed     S packed for the next chunk
//
// A thread of another warpgroup asks for the tiles. Outputs are laid where V was, and two warps of that warpgroup put them to
// global memory, in whole rows. When the warps that multiply did both, it took 500 of a chunk's 2400 cycles. Where products
// under way write overlapping parts of one accumulator, ptxas has each of them waited for: so the triangle of T is two halves
// with accumulators of their own, and M, zeros above its diagonal, is multiplied whole.
#pragma once

#include "segments.cuh"
#include "wgmma.cuh"

namespace gdn {

constexpr int GROUP_ROWS = 64, V_TILE = CHUNK * GROUP_ROWS * 2;

struct Maps {
  CUtensorMap q, k, v;  // boxes: see copy_box
};

template <int GROUPS, int STAGES>
struct GroupShared {
  char k[STAGES][D_TILE], q[STAGES][D_TILE];  // two halves of 64 columns each
  char v[STAGES][GROUPS][V_TILE];  // and, when V has been read, the outputs
  Prepared prepared[STAGES];
  uint64_t full[STAGES], laid[STAGES], empty[STAGES];  // a stage's tiles are there; its outputs are; it is free
};
template <int GROUPS, int STAGES>
constexpr int group_shared() { return sizeof(GroupShared<GROUPS, STAGES>); }

#if FLASHCORE_WGMMA

// The one thread that asks for all chunks' tiles.
template <bool OUTPUTS, int GROUPS, int STAGES>
__device__ __forceinline__ void ask(const Prefill& p, const Maps& maps, GroupShared<GROUPS, STAGES>& s, const Segment& at,
                                    int half, bool values) {
  constexpr uint32_t PREPARED = OUTPUTS ? sizeof(Prepared) : sizeof(Prepared) / 2;
  const uint32_t bytes = D_TILE + (OUTPUTS ? D_TILE : 0) + (values ? GROUPS * V_TILE : 0) + PREPARED;
  const char* prepared = p.prepared + (at.number * p.HV + at.hv) * sizeof(Prepared);
  int token = static_cast<int>(at.first);
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, token += CHUNK, prepared += p.HV * sizeof(Prepared)) {
    const int stage = chunk % STAGES;
    const uint32_t full = shared_address(&s.full[stage]);
    if (chunk >= STAGES) wait_for(shared_address(&s.empty[stage]), (chunk / STAGES - 1) & 1);
    arrive_and_expect(full, bytes);
    copy_box(shared_address(s.k[stage]), maps.k, token, 0, at.h, full);
    if (values) copy_box(shared_address(s.v[stage]), maps.v, token, half, at.hv, full);
    copy_bulk(shared_address(&s.prepared[stage]), prepared, PREPARED, full);
    if constexpr (OUTPUTS) copy_box(shared_address(s.q[stage]), maps.q, token, 0, at.h, full);
  }
}

// The warps that put the outputs of all chunks, laid where V was: eight lanes a token, so that rows are whole.
constexpr int PUTTING = 2;  // warps
template <int GROUPS, int STAGES>
__device__ __forceinline__ void put(const Prefill& p, GroupShared<GROUPS, STAGES>& s, const Segment& at, int half, int thread) {
  const int first = thread / 8, piece = thread % 8, lane = thread % 32;
  const uint32_t own = in_matrix(first, piece);  // 8 rows further are 1024 bytes further: PUTTING warps take a multiple of 8
  const int64_t row = static_cast<int64_t>(p.HV) * D;
  __nv_bfloat16* to = p.output + (at.first + first) * row + at.hv * D + half * GROUP_ROWS + piece * 8;
  int left = static_cast<int>(at.tokens) - first;
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, left -= CHUNK) {
    const int stage = chunk % STAGES;
    wait_for(shared_address(&s.laid[stage]), chunk / STAGES & 1);
#pragma unroll 1
    for (int i = 0; i < CHUNK; i += PUTTING * 4) {
#pragma unroll
      for (int group = 0; group < GROUPS; ++group)
        if (i < left)
          store16(to + group * GROUP_ROWS, *reinterpret_cast<const uint4*>(s.v[stage][group] + own + i * 128));
      to += PUTTING * 4 * row;
    }
    shared_written();  // the copy engine brings another V here
    __syncwarp();
    if (lane == 0) arrive(shared_address(&s.empty[stage]));
  }
}

// d += X M^T, for all of M; X as left operands of 16 tokens each.
__device__ __forceinline__ void square_times(float (&d)[8][4], const uint32_t (&X)[4][4], uint32_t M) {
  const Along m(M);
#pragma unroll
  for (int u = 0; u < 4; ++u) product(d, X[u], further(m, u * 32), 1);
}
// d = X T^T, tokens 0 to 31 and 32 to 63; T's upper right quarter is never read: the gates lie there.
__device__ __forceinline__ void triangle_times(float (&d)[2][4][4], const uint32_t (&X)[4][4], uint32_t T) {
  const Along b(T);
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if (u < 2) product(d[0], X[u], further(b, u * 32), u > 0);
    product(d[1], X[u], further(b, 4096 + u * 32), u > 0);
  }
}

// Gate `which` of tokens 8 i + 2t and the next one.
__device__ __forceinline__ float2 gates_of(const char* prepared, int which, int i, int t) {
  return *reinterpret_cast<const float2*>(prepared + gate_at(which, 8 * i + 2 * t));
}

template <bool OUTPUTS, int GROUPS, int STAGES>
__device__ __forceinline__ void group_walk(float (&S)[16][4], const Prefill& p, GroupShared<GROUPS, STAGES>& s,
                                           const Segment& at, int half, bool values) {
  const int group = GROUPS > 1 ? threadIdx.x / 128 : 0, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32, t = lane % 4;
  // where a lane points for 16 tokens and the warp's 16 columns of V, in the layout of gdn's copies
  const uint32_t v_at = in_matrix(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  const int count = __shfl_sync(0xffffffffu, at.count, 0);  // of a loop with lanes apart, ptxas would wait for each product
  uint32_t outputs[4][4] = {};  // of the chunk before, of 16 tokens each
  const auto lay = [&](int chunk) {  // a chunk's outputs where its V was; this warp needs nothing of the chunk any more
#pragma unroll
    for (int j = 0; j < 4; ++j) store_transposed(shared_address(s.v[chunk % STAGES][group]) + v_at + j * 2048, outputs[j]);
    __syncwarp();
    if (lane == 0) arrive(shared_address(&s.laid[chunk % STAGES]));
  };

  uint32_t before[8][4];  // S in front of a chunk, as left operands
#pragma unroll
  for (int step = 0; step < 8; ++step) as_left(before[step], S[2 * step], S[2 * step + 1]);

#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    const int stage = chunk % STAGES;
    const char* const prepared = reinterpret_cast<const char*>(&s.prepared[stage]);
    const uint32_t k_tile = shared_address(s.k[stage]), q_tile = shared_address(s.q[stage]);
    const uint32_t v_tile = shared_address(s.v[stage][group]);
    const Along keys(k_tile), queries(q_tile);
    const Across<D_TILE / 2> keys_across(k_tile);
    const uint32_t T = shared_address(prepared), M = T + sizeof(Prepared) / 2;
    wait_for(shared_address(&s.full[stage]), chunk / STAGES & 1);
    const int64_t left = at.tokens - static_cast<int64_t>(chunk) * CHUNK;
    if (left < CHUNK) {  // rows of the next sequence, or of nobody: zeros in K and V, for 0 x NaN is none. Q's reach no output
#pragma unroll 1
      for (int i = thread; i < CHUNK * 8; i += 128)
        if (i / 8 >= left) {
          const uint4 zero = {0, 0, 0, 0};
          reinterpret_cast<uint4*>(s.k[stage])[i] = zero, reinterpret_cast<uint4*>(s.k[stage] + D_TILE / 2)[i] = zero;
          reinterpret_cast<uint4*>(s.v[stage][group])[i] = zero;
        }
      shared_written();
      meet_warpgroup(group + 1);
    }

    float x[8][4], d[2][4][4], o[8][4];
    open_products();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      product(x, before[step], further(keys, step / 4 * (D_TILE / 2) + step % 4 * 32), step > 0);
    commit_products();
    if constexpr (OUTPUTS) {
      if (chunk > 0) lay(chunk - 1);
    }
    uint32_t v[4][4] = {};
    float2 in[8];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (OUTPUTS || values) load_transposed(v[j], v_tile + v_at + j * 2048);
#pragma unroll
    for (int i = 0; i < 8; ++i) in[i] = gates_of(prepared, IN, i, t);
    if constexpr (OUTPUTS) {
      open_products();
#pragma unroll
      for (int step = 0; step < 4; ++step) product(o, before[step], further(queries, step * 32), step > 0);
      commit_products();
    }

    wait_for_products<OUTPUTS ? 1 : 0>();
    hold(x);
    const float kept = gates_of(prepared, IN, 7, 3).y;
    uint32_t R[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 beta = gates_of(prepared, BETA, 2 * j + e, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint32_t word = v[j][2 * e + c / 2];
          const float value = __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
          float& y = x[2 * j + e][c];
          y = (c % 2 ? beta.y : beta.x) * fmaf(-(c % 2 ? in[2 * j + e].y : in[2 * j + e].x), y, value);
        }
      }
      as_left(R[j], x[2 * j], x[2 * j + 1]);
    }

    open_products();
    triangle_times(d, R, T);
    commit_products();
    if constexpr (OUTPUTS) {
#pragma unroll
      for (int step = 4; step < 8; ++step) product(o, before[step], further(queries, D_TILE / 2 + (step - 4) * 32), 1);
      commit_products();
    }
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] *= kept;
    wait_for_products<OUTPUTS ? 1 : 0>();
    hold(d[0]), hold(d[1]);
    uint32_t plain[4][4], decayed[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float later[2][4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 out = gates_of(prepared, OUT, 2 * j + e, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) later[e][c] = d[j / 2][2 * (j % 2) + e][c] * (c % 2 ? out.y : out.x);
      }
      as_left(decayed[j], later[0], later[1]);
    }
    open_products();
#pragma unroll
    for (int u = 0; u < 4; ++u) product_across(S, decayed[u], further(keys_across, u * 2048), 1);
    commit_products();
    if constexpr (OUTPUTS) {
#pragma unroll
      for (int j = 0; j < 4; ++j) as_left(plain[j], d[j / 2][2 * (j % 2)], d[j / 2][2 * (j % 2) + 1]);
      wait_for_products<1>();
      hold(o);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 in = gates_of(prepared, IN, i, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) o[i][c] *= p.scale * (c % 2 ? in.y : in.x);
      }
      open_products();
      square_times(o, plain, M);
      commit_products();
    }
    wait_for_products<OUTPUTS ? 1 : 0>();
    hold(S);
    if (!OUTPUTS && lane == 0) arrive(shared_address(&s.empty[stage]));
#pragma unroll
    for (int step = 0; step < 8; ++step) as_left(before[step], S[2 * step], S[2 * step + 1]);
    if constexpr (OUTPUTS) {
      wait_for_products<0>();
      hold(o);
#pragma unroll
      for (int j = 0; j < 4; ++j) as_left(outputs[j], o[2 * j], o[2 * j + 1]);
    }
  }
  if constexpr (OUTPUTS) {
    if (count > 0) lay(count - 1);
  }
}

template <bool OUTPUTS, int GROUPS, int STAGES>
__device__ __forceinline__ void group_begin(GroupShared<GROUPS, STAGES>& s) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i)
      init_barrier(shared_address(&s.full[i]), 1), init_barrier(shared_address(&s.laid[i]), GROUPS * 4),
          init_barrier(shared_address(&s.empty[i]), OUTPUTS ? PUTTING : GROUPS * 4);
    barriers_initialised();
  }
  __syncthreads();
}

#endif  // FLASHCORE_WGMMA

// GROUPS warpgroups, and one more that asks and puts. Where a CTA is alone on its SM and small, each thread has what registers
// it wants; else those that ask give up theirs.
__host__ __device__ constexpr int group_threads(int groups) { return (groups + 1) * 128; }
__host__ __device__ constexpr int group_resident(int groups, int stages) { return groups == 1 && stages == 2 ? 2 : 1; }
__host__ __device__ constexpr bool group_gives(int groups, int stages) { return groups > 1 || stages == 2; }
// A thread's registers, multiples of 8; all together no more than the CTA has been given at its launch (168 or 128 a thread).
__host__ __device__ constexpr int asking(int groups) { return groups > 1 ? 40 : 32; }
__host__ __device__ constexpr int multiplying(int groups) { return groups > 1 ? 232 : 224; }

// grid (2 / GROUPS, HV, numbers of segments).
template <int GROUPS, int STAGES>
__global__ void __launch_bounds__(group_threads(GROUPS), group_resident(GROUPS, STAGES))
gdn_prefill_group(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_WGMMA
  auto& s = *reinterpret_cast<GroupShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = blockIdx.x * GROUPS, row = half * GROUP_ROWS + warp * 16;
  float S[16][4];
  if (!p.segment && warp < GROUPS * 4) {  // before anything that needs cu_seqlens
    const float* const start = p.state + (static_cast<int64_t>(blockIdx.z) * p.HV + blockIdx.y) * D * D;
#pragma unroll
    for (int j = 0; j < 16; ++j) load_state(S[j], start, row, j, lane);
  }
  group_begin<true>(s);
  const Segment at(p, blockIdx.y);  // divides by a call that takes more registers than those that ask have
  if (!at.there()) return;
  if (warp >= GROUPS * 4) {
    if constexpr (group_gives(GROUPS, STAGES)) fewer_registers<asking(GROUPS)>();
    const int other = warp - GROUPS * 4;
    if (other == 0 && elected()) ask<true>(p, maps, s, at, half, true);
    if (other > 0 && other <= PUTTING) put(p, s, at, half, threadIdx.x - (GROUPS * 4 + 1) * 32);
    return;
  }
  if constexpr (group_gives(GROUPS, STAGES)) more_registers<multiplying(GROUPS)>();
  if (p.segment) {
    const float* const start = at.start();
#pragma unroll
    for (int j = 0; j < 16; ++j) load_state(S[j], start, row, j, lane);
  }
  group_walk<true>(S, p, s, at, half, true);
  if (!at.last) return;
#pragma unroll
  for (int j = 0; j < 16; ++j) store_state(at.end(), S[j], row, j, lane);
#endif
}

// grid (4 / GROUPS, HV, numbers of segments): the first half makes L, the second Phi.
template <int GROUPS, int STAGES>
__global__ void __launch_bounds__(group_threads(GROUPS), group_resident(GROUPS, STAGES))
gdn_prefill_group_transfer(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if FLASHCORE_WGMMA
  auto& s = *reinterpret_cast<GroupShared<GROUPS, STAGES>*>(tile_memory());
  constexpr int HALF = 2 / GROUPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = blockIdx.x % HALF * GROUPS;
  const int row = half * GROUP_ROWS + warp * 16;
  const bool values = blockIdx.x < HALF;
  group_begin<false>(s);
  const Segment at(p, blockIdx.y);
  if (!at.there() || at.last || (at.opens && !values)) return;
  if (warp >= GROUPS * 4) {
    if constexpr (group_gives(GROUPS, STAGES)) fewer_registers<asking(GROUPS)>();
    if (warp == GROUPS * 4 && elected()) ask<false>(p, maps, s, at, half, values);
    return;
  }
  if constexpr (group_gives(GROUPS, STAGES)) more_registers<multiplying(GROUPS)>();
  float S[16][4];
  begin_transfer(S, at, values, row, lane);
  group_walk<false>(S, p, s, at, half, values);
  const int64_t to = (at.slot * p.HV + at.hv) * D * D;
  if (values) {
#pragma unroll
    for (int j = 0; j < 16; ++j) store_state(p.ends + to, S[j], row, j, lane);
  } else {
    store_transfer(reinterpret_cast<uint4*>(p.transfers + to), S, row / 16, lane);
  }
#endif
}

}  // namespace gdn
