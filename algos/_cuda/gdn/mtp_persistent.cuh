// Verify, outputs alone, in large batches: mtp.cuh's kernel without states to write, in CTAs that stay.
//
// A CTA has a run of tiles, one after the other: `each` or one more, all rows of one head before those of the next. So
//   - a register of S gets the next tile's bytes as soon as the product has read it: memory is asked while sums are made, and no registers are
//     needed for it. The numbers that the next tile's address needs are asked for a tile earlier still.
//   - M, W, k and q of a head are made once for all of its tiles in a CTA, and a head ahead: there are places for two heads.
// Barriers in shared memory, not named ones: who waits for a head's numbers waits for the last warp alone.
// Steps as in mtp.cuh.
// Provenance: as mtp.cuh.
#pragma once

#include "mtp.cuh"

namespace gdn {

struct PersistentArguments {
  uint32_t each, more;  // tiles of a CTA; the first `more` CTAs have one more
  MtpArguments of;      // mode is OUTPUTS
};

// Of all `tiles`, for at most `ctas` CTAs, and how many there are.
inline PersistentArguments runs_of(const MtpArguments& of, uint32_t tiles, uint32_t ctas) {
  const uint32_t used = ctas < tiles ? ctas : tiles;
  return {tiles / used, tiles % used, of};
}
inline uint32_t ctas_of(const PersistentArguments& run, uint32_t tiles) { return (tiles - run.more) / run.each; }

#ifdef __CUDACC__

// What a row's tensors say, as it comes from memory.
struct AskedRow {
  uint32_t slot, slot_high, accepted, accepted_high;
  int32_t begin, end;

  // Lane t has the slot of column t.
  __device__ __forceinline__ void ask(const MtpArguments& p, uint32_t i_b, uint32_t lane) {
    const char* const slots = static_cast<const char*>(p.slots) + static_cast<uint64_t>(i_b) * p.slots_step;
    const int32_t* const slot_at = index_at(slots, min(lane, uint32_t{p.columns} - 1), p.slot_shift);
    const int32_t* const accepted_at = index_at(p.accepted, i_b, p.accepted_shift);
    ptx::load_now<4>(&slot, slot_at), slot_high = ptx::load_now_if(p.slot_shift == 3, slot_at + 1);
    accepted = ptx::load_now_if(p.accepted != nullptr, accepted_at);
    accepted_high = ptx::load_now_if(p.accepted_shift == 3, accepted_at + 1);
    begin = ptx::load_now_if(p.cu_seqlens != nullptr, p.cu_seqlens + i_b);
    end = ptx::load_now_if(p.cu_seqlens != nullptr, p.cu_seqlens + i_b + 1);
  }
  __device__ __forceinline__ int count(const MtpArguments& p) const {
    return p.cu_seqlens == nullptr ? p.tokens : min(end - begin, p.tokens);
  }
  // The slot that the row starts from; -1: padding.
  __device__ __forceinline__ int32_t start(const MtpArguments& p) const {
    const int32_t from = p.accepted == nullptr ? 1 : accepted_high == 0 ? static_cast<int32_t>(accepted) : -1;
    const int32_t own = slot_high == 0 ? static_cast<int32_t>(slot) : -1;
    const int32_t start = __shfl_sync(0xffffffffu, own, p.columns > 1 ? from - 1 & 31 : 0);
    const bool live = from >= 1 && from <= p.tokens && start >= p.first_slot && start < p.slots_end && count(p) >= 1;
    return live ? start : -1;
  }
};

constexpr int HEADS_AHEAD = 2;  // places for a head's numbers

template <typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS>
struct PersistentMemory {  // shared
  using S = Shape<T, TOKENS, false, ROWS, SPLIT, GROUPS>;
  OfHead<TOKENS, S::PAD> heads[HEADS_AHEAD];
  float2 partial[2][SPLIT > 1 ? GROUPS : 1][SPLIT][S::N][S::HALVES][32];
  uint64_t vectors[HEADS_AHEAD], coefficients[HEADS_AHEAD], unused[HEADS_AHEAD];  // barriers
};

template <bool GIVEN, typename T, typename Token, int TOKENS, int ROWS, int SPLIT, int GROUPS>
__device__ __forceinline__ void verify_run(const PersistentArguments& run, PersistentMemory<T, TOKENS, ROWS, SPLIT, GROUPS>& memory) {
  using S = Shape<T, TOKENS, false, ROWS, SPLIT, GROUPS>;
  constexpr int EACH = S::EACH, HALVES = S::HALVES, N = S::N, WARPS = S::WARPS, TILES = S::TILES;
  constexpr int BLOCK = 4 * EACH, BLOCKS = K / SPLIT / BLOCK;
  const MtpArguments& p = run.of;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4;
  const uint32_t first = blockIdx.x * run.each + min(blockIdx.x, run.more);
  const uint32_t end = first + run.each + (blockIdx.x < run.more);
  const uint32_t first_head = first / TILES;
  const auto barrier = [](uint64_t& at) { return Barrier(shared_address(&at)); };

  if (warp == WARPS) {  // 3. M and W
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < HEADS_AHEAD; ++i) {
        barrier(memory.vectors[i]).init(1), barrier(memory.coefficients[i]).init(1), barrier(memory.unused[i]).init(WARPS);
      }
    }
    __syncwarp();
    named_barrier_arrive<S::THREADS>(0);
#pragma unroll 1
    for (uint32_t i = 0; first_head + i <= (end - 1) / TILES; ++i) {
      const uint32_t at = i % HEADS_AHEAD, head = first_head + i, i_b = p.by_HV.divide(head);
      if (i >= HEADS_AHEAD) barrier(memory.unused[at]).wait(i / HEADS_AHEAD - 1);
      make_head<GIVEN, Token>(memory.heads[at], p, i_b, head - i_b * p.HV, lane, [&] {
        barrier(memory.vectors[at]).arrive(lane);
        barrier(memory.vectors[at]).wait(i / HEADS_AHEAD);  // has ended: ptxas would move the arrival to the end, and the gates' loads, too
      });
      barrier(memory.coefficients[at]).arrive(lane);
    }
    return;
  }

  const uint32_t part = SPLIT == 1 ? 0 : warp % SPLIT, group = warp / SPLIT;
  const uint32_t column = part * (K / SPLIT) + c * EACH;
  const uint32_t row_in_tile = group * ROWS + lane / 4;
  AskedRow asked;
  uint32_t w[BLOCKS * HALVES][4], v[HALVES][N];
  // 2. Load S of a tile of row `of`, or nothing; and v. `i`: of all accesses.
  const char* from = nullptr;
  bool there = false;
  const auto look = [&](uint32_t tile, uint32_t i_b) {  // at what the tile's address needs
    const uint32_t i_hv = tile / TILES - i_b * p.HV;
    const int32_t start = asked.start(p);
    there = start >= 0;
    from = static_cast<const char*>(p.pool) + static_cast<int64_t>(start) * p.slot_stride * int64_t(sizeof(T)) +
           (i_hv * p.head_bytes + ((tile % TILES * S::TILE + row_in_tile) * K + column) * uint32_t(sizeof(T)));
  };
  const auto load_block = [&](int i) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      ptx::load_past_if(there, w[i * HALVES + h], from + (h * 8 * K + i * BLOCK) * int(sizeof(T)));
  };
  const auto load_v = [&](uint32_t tile, uint32_t i_b) {
    const uint32_t i_hv = tile / TILES - i_b * p.HV;
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
        ptx::load_now<2>(&v[h][j], of_token(p.v, i_b, p.v_batch, p.v_token,
                                            max(asked.begin + min(int(4 * j + c), asked.count(p) - 1), 0),
                                            i_hv * V + tile % TILES * S::TILE + row_in_tile + 8 * h));
  };

  uint32_t i_b = p.by_HV.divide(first_head);
  asked.ask(p, i_b, lane);  // 1. Load slots
  look(first, i_b);
  if (there) {
#pragma unroll
    for (int i = 0; i < BLOCKS * HALVES; ++i)
      load<16, LOAD_FIRST>(w[i], from + (i % HALVES * 8 * K + i / HALVES * BLOCK) * int(sizeof(T)));
  }
  load_v(first, i_b);
  bool live = there;
  int32_t begin = asked.begin, count = asked.count(p);
  uint32_t i_next = p.by_HV.divide(min(first + 1, end - 1) / TILES);
  if (i_next != i_b) asked.ask(p, i_next, lane);
  named_barrier_sync<S::THREADS>(0);  // barriers are there

#pragma unroll 1
  for (uint32_t tile = first; tile < end; ++tile) {
    const uint32_t i_head = tile / TILES - first_head, at = i_head % HEADS_AHEAD, phase = i_head / HEADS_AHEAD;
    const uint32_t i_hv = tile / TILES - i_b * p.HV;
    const auto& head = memory.heads[at];
    const uint32_t next = min(tile + 1, end - 1);
    look(next, i_next);
    there = there && tile + 1 < end;

    // 4. x and y, and the next S
    barrier(memory.vectors[at]).wait(phase);
    float d[N][2][2][4] = {};
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      uint32_t s[HALVES][4];
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int n = 0; n < 4; ++n) s[h][n] = w[i * HALVES + h][n];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        uint32_t of_vectors[EACH / 2];
        read<EACH * 2>(of_vectors, &head.vectors[8 * j + lane / 4][(column + i * BLOCK) * 2]);
        multiply_block<Token, ROWS>(d[j][i % 2], s, of_vectors, static_cast<const T*>(nullptr));
      }
      load_block(i);
    }
    uint32_t v_own[HALVES][N];
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) v_own[h][j] = v[h][j];
    load_v(next, i_next);
    const bool own_live = live;
    const int32_t own_begin = begin, own_count = count;
    const uint32_t own_b = i_b;
    live = there, begin = asked.begin, count = asked.count(p), i_b = i_next;
    i_next = p.by_HV.divide(min(tile + 2, end - 1) / TILES);
    if (i_next != i_b) asked.ask(p, i_next, lane);

    float2 xy[N][HALVES];
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const auto sum = [&](int n) { return (d[j][0][0][n] + d[j][0][1][n]) + (d[j][1][0][n] + d[j][1][1][n]); };
        xy[j][h] = {sum(2 * h), sum(2 * h + 1)};
        if constexpr (SPLIT > 1) memory.partial[tile & 1][group][part][j][h][lane] = xy[j][h];
      }
    if constexpr (SPLIT > 1) {
      named_barrier_sync<SPLIT * 32>(1 + group);
      if (part == 0) {
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int h = 0; h < HALVES; ++h) {
            xy[j][h] = memory.partial[tile & 1][group][0][j][h][lane];
#pragma unroll
            for (int n = 1; n < SPLIT; ++n) {
              const float2 more = memory.partial[tile & 1][group][n][j][h][lane];
              xy[j][h].x += more.x, xy[j][h].y += more.y;
            }
          }
      }
    }

    // 5. Sums and outputs
    if (part == 0) {
      barrier(memory.coefficients[at]).wait(phase);
      const auto& coefficients = head.coefficients;
      const int64_t token = static_cast<int64_t>(p.HV * V);
      Token* const output = reinterpret_cast<Token*>(p.output) +
                            ((static_cast<int64_t>(p.cu_seqlens ? 0 : own_b * p.tokens) + own_begin) * p.HV + i_hv) * V +
                            tile % TILES * S::TILE + row_in_tile;
      float r[N][HALVES];
      float4 factors[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        factors[j] = coefficients.factors[4 * j + c];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) r[j][h] = factors[j].x * token_value<Token>(v_own[h][j]) - factors[j].y * xy[j][h].x;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int t = 4 * j + c;
        float o[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) o[h] = factors[j].z * xy[j][h].y;
#pragma unroll
        for (int s = 0; s < 4 * j + 4; ++s) {
          const float W = coefficients.W[t][s];
#pragma unroll
          for (int h = 0; h < HALVES; ++h) {
            const float r_s = __shfl_sync(0xffffffffu, r[s / 4][h], (lane & ~3u) + s % 4);
            if (s <= t) o[h] = fmaf(W, r_s, o[h]);
          }
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
          if (t < own_count) output[t * token + 8 * h] = to_token<Token>(own_live ? o[h] : 0.f);
      }
    }
    if ((tile + 1) / TILES != tile / TILES) barrier(memory.unused[at]).arrive(lane);
  }
}

// CTAS: of an SM.
template <bool GIVEN, typename T, typename Token, int TOKENS, int ROWS, int SPLIT, int GROUPS, int CTAS>
__global__ void __launch_bounds__((SPLIT * GROUPS + 1) * 32, CTAS)
gdn_mtp_persistent(const __grid_constant__ PersistentArguments p) {
  auto& memory = *reinterpret_cast<PersistentMemory<T, TOKENS, ROWS, SPLIT, GROUPS>*>(shared_memory());
  verify_run<GIVEN, T, Token, TOKENS, ROWS, SPLIT, GROUPS>(p, memory);
}

#endif  // __CUDACC__

}  // namespace gdn
