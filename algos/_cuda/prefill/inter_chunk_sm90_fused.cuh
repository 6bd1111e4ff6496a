// Prefill in one launch: T = (I + A)^-1 and the gates are made by the CTAs that go from chunk to chunk, not by a kernel before them.
// A work tile is a sequence and value head, for a cluster of two CTAs with half of V each. Each CTA has a consumer warpgroup, one
// that makes M (the maker) and one that makes T (the team): of every other chunk, and both are copied to the peer. In the fourth
// warpgroup one thread loads Q and V, a warp loads K and computes the gates, two store the outputs.
//
// Two rings of stages: K and T (and the gates), needed from the first product of T on until S' is complete; and Q, V and M, until
// the outputs are stored. The first has a stage more, because T takes longer than a chunk of the consumers.
//
// Who sets which barrier of a stage for whom: `keys_full` TMA -> team, maker, consumers; `gates_ready` gates -> team, maker;
// `t_ready` team, or the peer's -> consumers; `keys_empty` consumers of both CTAs -> K and gates. `full` TMA -> maker, consumers;
// `m_ready` maker, or the peer's -> consumers; `outputs_ready` consumers -> epilogue; `empty` epilogues of both -> Q and V.
//
// The maker's warps also arrive at `m_ready` when they have waited for `full`, at each use of a stage. Otherwise, at a state or a chunk
// whose M the peer makes, nothing would keep the stage from being filled again before that wait, which would then be for a later
// phase of the same parity, and never end.
//
// A CTA ends when all that its peer sends it has arrived: the two threads that fill the rings wait for their last phases. A barrier
// of the cluster at the end would not do: it is relaxed, and orders no arrival at the peer before it; one that released would also
// wait for the stores to memory.
//
// With more tiles than clusters, each CTA sorts the sequences by length, and clusters take tiles in this order, longest first, from
// a counter.
//
// Steps: as in inter_chunk_sm90.cuh and intra_chunk_steps.cuh.
#pragma once

#include "inter_chunk_sm90.cuh"
#include "intra_chunk_sm90.cuh"

namespace gdn {

constexpr int FUSED_SEQUENCES = 256;  // at most, with more tiles than clusters

struct KeyStage {
  char k[QK_TILE];  // two halves of 64 columns each
  char T[MATRIX];   // and the gates: Prepared::T
};
struct ValueStage {  // or the state before a tile: see load_state_stage
  char q[QK_TILE];
  char v[1][V_TILE];  // replaced by the outputs after V has been read
  char M[MATRIX];
};
constexpr int HALF_STATE_BLOCK = state_block(GROUP_ROWS);
static_assert(sizeof(ValueStage) == 4 * HALF_STATE_BLOCK);
// A sequence, and its tokens.
struct alignas(16) FusedSequence {
  int n, first, tokens;
  StateOf state;
};
struct FusedNorms {
  float key[POOL ? CHUNK : 1], query[POOL ? CHUNK : 1];  // see IntraShared
};
struct FusedShared {
  static constexpr int KEYS = 4, STAGES = 3, TILES = 4;
  // How many warps read which tile comes next: all, of both CTAs.
  static constexpr int READERS = 2 * (4 + 4 + 4 + 4);
  KeyStage keys[KEYS];
  ValueStage stages[STAGES];
  char operands[2][6 * OPERAND];  // of the team, alternating
  Gates gates[KEYS];
  FusedNorms norms;
  uint64_t keys_full[KEYS], gates_ready[KEYS], t_ready[KEYS], keys_empty[KEYS];
  uint64_t full[STAGES], m_ready[STAGES], outputs_ready[STAGES], empty[STAGES];
  uint64_t tile_ready[TILES], tile_free[TILES];  // the latter is the first CTA's for both
  uint32_t tile[TILES];                          // number in the order
  FusedSequence order[FUSED_SEQUENCES];          // longest first
  uint32_t lengths[FUSED_SEQUENCES];
};
static_assert(sizeof(FusedShared) <= 227 * 1024);
constexpr int FUSED_THREADS = 512;

#if FLASHCORE_WGMMA

// How many chunks have gone through a ring of N stages, uniform in a warp.
template <int N>
struct Ring {
  int begun = 0;
  __device__ __forceinline__ int stage(int i) const { return (begun + i) % N; }
  __device__ __forceinline__ uint32_t parity(int i) const { return (begun + i) / N & 1; }
};

// A warp's arrival at the barriers of both CTAs.
__device__ __forceinline__ void warp_arrives_at_both(const uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVALS) {
#pragma unroll
    for (int rank = 0; rank < 2; ++rank) mbarrier_arrive_at_peer(at_peer(shared_address(&barrier), rank));
  }
}
// Before a CTA ends: waits until the last `N` of the `used` uses of a ring have been freed by both CTAs. An arrival from the peer
// may still be under way when the peer's threads have gone on, and one that finds no CTA is the end of the context.
template <int N>
__device__ __forceinline__ void wait_for_the_last(const uint64_t (&freed)[N], int used) {
#pragma unroll 1
  for (int i = used; i < used + N; ++i) wait_for(freed[i % N], (i / N & 1) ^ 1);
}
// A CTA makes T and M of every other chunk of those that have gone through, and gets the others from its peer.
__device__ __forceinline__ bool makes(int number) { return number % 2 == cluster_rank(); }
// A warpgroup's arrivals after a named barrier, which orders the other threads' accesses. For compute-sanitizer, of all threads:
// see ARRIVALS.
constexpr int GROUP_ARRIVALS = ARRIVALS > 1 ? 4 * ARRIVALS : 1;
// As many by one thread, where the matrix comes from the peer, or where there is none.
__device__ __forceinline__ void arrive_for_group(const uint64_t& ready, int done = 0) {
#pragma unroll 1
  for (int i = done; i < GROUP_ARRIVALS; ++i) mbarrier_arrive(shared_address(&ready));
}
// The warpgroup that has made `matrix` says so here, and sends it to the peer; there a thread has announced the bytes.
__device__ __forceinline__ void share(const char* matrix, const uint64_t& ready, int barrier) {
  fence_proxy_async();
  named_barrier_sync<128>(barrier);
  if (threadIdx.x % 128 < GROUP_ARRIVALS) mbarrier_arrive(shared_address(&ready));
  if (threadIdx.x % 128 == 0) {
    const int peer = cluster_rank() ^ 1;
    copy_to_peer(at_peer(shared_address(matrix), peer), shared_address(matrix), MATRIX, at_peer(shared_address(&ready), peer));
  }
}
__device__ __forceinline__ void expect_matrix(const uint64_t& ready) {
  mbarrier_arrive_expect_tx(shared_address(&ready), MATRIX);
  arrive_for_group(ready, 1);
}

// Steps 1 and 2: a warp loads K and computes the gates. Raw gates of the next chunk are loaded meanwhile.
__device__ __forceinline__ void make_gates(const Prefill& p, const Maps& maps, FusedShared& s, int done, const Segment& at) {
  const Ring<FusedShared::KEYS> ring{done};
  const int lane = threadIdx.x % 32;
  ChunkTile tile{0, at.h, at.first, at.tokens, 1};
  RawGates raw;
  raw.load_head(p, at.hv);
  ChunkTile own = tile;  // the next of those whose T is made here
  const int skipped = makes(done) ? 0 : CHUNK;
  own.begin += skipped, own.left -= skipped;
  raw.load_tokens(p, own, at.hv, lane);
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, tile.begin += CHUNK, tile.left -= CHUNK) {
    const int stage = ring.stage(chunk);
    if (done == 0 && chunk == 2) wait_for(s.keys_full[0], 0);  // the first loads in turn: see produce
    wait_for(s.keys_empty[stage], ring.parity(chunk) ^ 1);
    const bool makes_t = makes(done + chunk);
    if (elect_one()) {
      load_k(s.keys[stage].k, maps.k, tile, s.keys_full[stage]);
      if (!makes_t) expect_matrix(s.t_ready[stage]);
    }
    __syncwarp();
    if (!makes_t) continue;
    const RawGates now = raw;
    const int count = own.count();
    own.begin += 2 * CHUNK, own.left -= 2 * CHUNK;
    if (own.left > 0) raw.load_tokens(p, own, at.hv, lane);
    compute_gates(p, s.gates[stage], now, count, lane);
    warp_arrives(s.gates_ready[stage]);
  }
}

// A warp's row of K K^T, from its accumulators.
struct OwnRow {
  Block own;       // the diagonal
  Words k[3];      // right operands
  __device__ __forceinline__ OwnRow(const float (&d)[8][4], int row) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        own[e][c] = row < 2 ? row < 1 ? d[e][c] : d[2 + e][c] : row < 3 ? d[4 + e][c] : d[6 + e][c];
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (j < row) {
        f16_words(k[j], reinterpret_cast<const Block&>(d[2 * j]));
#pragma unroll
        for (int i = 0; i < 4; ++i) k[j][i] = transposed(k[j][i]);
      }
  }
  __device__ __forceinline__ void diagonal(Block& x, int, int) const {
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[e][c] = own[e][c];
  }
  __device__ __forceinline__ void below_diagonal(Words& w, int, int j, int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = k[j][i];
  }
};
constexpr int MAKER_BARRIER = 2, TEAM_BARRIER = 3;  // named barriers; 1: of the consumers

// Steps 3, 4 and 5 for every other chunk, by the team: a warp has a row of 16 x 16 blocks of T.
__device__ __forceinline__ void make_t(const Prefill& p, FusedShared& s, int done, const Segment& at) {
  const Ring<FusedShared::KEYS> ring{done};
  const int row = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), barrier = TEAM_BARRIER;
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
#pragma unroll 1
  for (int chunk = makes(done) ? 0 : 1; chunk < count; chunk += 2) {
    const int thread = thread_again() % 128, lane = thread % 32;
    const int stage = ring.stage(chunk), left = at.tokens - chunk * CHUNK;
    KeyStage& here = s.keys[stage];
    wait_for(s.keys_full[stage], ring.parity(chunk));
    if (left < CHUNK) {  // rows past the sequence's end: zeros, because 0 x NaN is not 0
      clear_rows(here.k, left, thread), clear_rows(here.k + QK_TILE / 2, left, thread);
      fence_proxy_async();
      named_barrier_sync<128>(barrier);
    }
    // 3. K K^T
    float d[8][4];
    const KMajor k(shared_address(here.k));
    begin_row_products(d, k, k);
    wait_for(s.gates_ready[stage], ring.parity(chunk));
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    // 4. Inverse, 5. T - I and the gates
    if constexpr (POOL) normalise(s.norms, p, d, row, lane);
    char* const operands = s.operands[(done + chunk) / 2 % 2];
    invert_row<StoreMatrix>(here.T, operands, OwnRow(d, row), s.gates[stage], row, barrier, lane);
    if (row == 0) store_gates(here.T, s.gates[stage], s.norms, thread_again() % 32, false);
    share(here.T, s.t_ready[stage], barrier);
  }
}

// Step 7, by the maker: see make_m in inter_chunk_sm90.cuh.
__device__ __forceinline__ void make_m_fused(const Prefill& p, FusedShared& s, int done, int states, const Segment& at) {
  const Ring<FusedShared::KEYS> keys_ring{done};
  const Ring<FusedShared::STAGES> ring{done + states};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    const int key_stage = keys_ring.stage(chunk);
    wait_for(s.full[ring.stage(chunk)], ring.parity(chunk));  // each time, else the parity of the next wait means another phase
    float by[2] = {p.scale, p.scale};
    if constexpr (POOL) {  // the norms of Q in each CTA: see make_m
      char* const prepared = s.keys[key_stage].T;
      const char* const q = s.stages[ring.stage(chunk)].q;
      const int row = warp * 16 + lane / 2;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sum = add_squares(sum, *reinterpret_cast<const uint4*>(q + lane % 2 * (QK_TILE / 2) + in_matrix(row, i ^ lane % 2 * 4)));
      const float norm = p.inverse_norm(sum + __shfl_xor_sync(0xffffffffu, sum, 1));
      wait_for(s.t_ready[key_stage], keys_ring.parity(chunk));
      if (lane % 2 == 0)
        *reinterpret_cast<float*>(prepared + gate_at(IN_Q, row)) = norm * *reinterpret_cast<const float*>(prepared + gate_at(IN, row));
      by[0] *= __shfl_sync(0xffffffffu, norm, 2 * g), by[1] *= __shfl_sync(0xffffffffu, norm, 2 * g + 16);
    }
    warp_arrives(s.m_ready[ring.stage(chunk)]);
    if (!makes(done + chunk)) continue;
    ValueStage& stage = s.stages[ring.stage(chunk)];
    const KMajor queries(shared_address(stage.q)), keys(shared_address(s.keys[key_stage].k));
    wait_for(s.keys_full[key_stage], keys_ring.parity(chunk));
    float d[8][4];
    begin_row_products(d, queries, keys);
    wait_for(s.gates_ready[key_stage], keys_ring.parity(chunk));
    const float* const sums = s.gates[key_stage].G;
    const float G[2] = {sums[warp * 16 + g], sums[warp * 16 + g + 8]};
    const uint32_t to = shared_address(stage.M) + in_matrix(warp * 16 + lane % 16, 0);
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    store_m(d, by, G, warp, lane, to, [&](int j, int t) {
      return POOL ? gates_of(s.keys[key_stage].T, SUM_KEY, j, t) : *reinterpret_cast<const float2*>(sums + 8 * j + 2 * t);
    });
    share(stage.M, s.m_ready[ring.stage(chunk)], MAKER_BARRIER);
  }
}

// Step 6 for Q and V, by one thread. `first` is called once the first chunk is asked for, `last` before the last one.
template <typename First, typename Last>
__device__ __forceinline__ void load_values(const Maps& maps, FusedShared& s, int done, int states, const Segment& at, int half,
                                            const First& first, const Last& last) {
  const Ring<FusedShared::STAGES> ring{done + states};
  int token = at.first;
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, token += CHUNK) {
    const int stage = ring.stage(chunk);
    const uint32_t full = shared_address(&s.full[stage]);
    if (chunk == at.count - 1) last();
    // The first loads in turn, see produce: first of all K. With single chunks the states are more, and nothing waits for K.
    if (done + states == 0 && chunk == 0 && at.count > 1) wait_for(s.keys_full[0], 0);
    if (done + states == 0 && chunk == 1) wait_for(s.full[0], 0);
    wait_for(s.empty[stage], ring.parity(chunk) ^ 1);
    if (!makes(done + chunk)) expect_matrix(s.m_ready[stage]);
    mbarrier_arrive_expect_tx(full, QK_TILE + V_TILE);
    tma_load_box(shared_address(s.stages[stage].v), maps.v, token, half, at.hv, full);
    tma_load_box(shared_address(s.stages[stage].q), maps.q, token, 0, at.h, full);
    if (chunk == 0) first();
  }
}

// A tile, as long as its state is needed.
template <bool K_FIRST>
struct TileState {
  int row;  // of the head's or of all states' rows
  StateOf state;
  __device__ __forceinline__ TileState(const Prefill& p, const Segment& at, int half)
      : row((POOL ? 0 : at.n * p.HV * HEAD_DIM) + p.state_row(at.hv) + (K_FIRST ? 0 : half * GROUP_ROWS)), state(at.state) {}
  // K_FIRST: the first block of columns.
  static __device__ __forceinline__ int block(const Prefill& p, int half) { return K_FIRST ? half * p.state_blocks() / 2 : 0; }
};

// The state before a tile comes through the ring of values, in a stage of its own, but for a CTA's first tile: the producer loads
// it, the consumers exchange it for the state after the tile before, and the epilogue stores that and frees the stage.
template <bool K_FIRST>
__device__ __forceinline__ void load_state_stage(const Prefill& p, const Maps& maps, FusedShared& s, int index, const Segment& at,
                                                 int half) {
  const Ring<FusedShared::STAGES> ring{index};
  const int stage = ring.stage(0), row = TileState<K_FIRST>(p, at, half).row;
  const uint32_t full = shared_address(&s.full[stage]), to = shared_address(&s.stages[stage]);
  wait_for(s.empty[stage], ring.parity(0) ^ 1);
  arrive_for_group(s.m_ready[stage]);  // a phase for each use of the stage
  if (POOL && at.state < 0) return mbarrier_arrive(full);  // zeros
  mbarrier_arrive_expect_tx(full, p.state_blocks() * HALF_STATE_BLOCK);
  if constexpr (POOL) tma_load_box(to, maps.state, row, TileState<K_FIRST>::block(p, half), at.state, full);
  else tma_load_state(to, maps.state, row, full);
}
template <bool K_FIRST>
__device__ __forceinline__ void exchange_state(float (&S)[16][4], const Prefill& p, FusedShared& s, int index, StateOf state,
                                               int row, int lane) {
  const Ring<FusedShared::STAGES> ring{index};
  const int stage = ring.stage(0);
  wait_for(s.full[stage], ring.parity(0));
  wait_for(s.m_ready[stage], ring.parity(0));  // the maker has waited for `full`
  char* const tile = reinterpret_cast<char*>(&s.stages[stage]);
  float next[16][4];
  read_state<HALF_STATE_BLOCK, K_FIRST>(next, p, tile, state, row + lane / 4, lane);
  row += lane / 4;
#pragma unroll
  for (int j = 0; j < 16; ++j)  // each lane where it has read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = S[j][2 * half], y = S[j][2 * half + 1];
      if constexpr (K_FIRST) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool bf16 = p.state_blocks() == 2;
          char* const to = tile + in_k_first(8 * j + lane % 4 * 2 + i, row + half * 8, bf16);
          if (bf16) *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16(i ? y : x);
          else *reinterpret_cast<float*>(to) = i ? y : x;
        }
      } else if (POOL && p.state_blocks() == 2) {
        const int at = j / 8 * HALF_STATE_BLOCK + in_matrix(row + half * 8, j % 8) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(tile + at) = token_pair<__nv_bfloat16>(x, y);
      } else {
        const int at = j / 4 * HALF_STATE_BLOCK + in_matrix(row + half * 8, j % 4 * 2 + lane % 4 / 2) + lane % 2 * 8;
        store_pair(tile + at, x, y);
      }
      S[j][2 * half] = next[j][2 * half], S[j][2 * half + 1] = next[j][2 * half + 1];
    }
  fence_proxy_async();
  warp_arrives(s.outputs_ready[stage]);
}
template <bool K_FIRST>
__device__ __forceinline__ void store_state_stage(const Prefill& p, const CUtensorMap& states, FusedShared& s, int index,
                                                  const TileState<K_FIRST>& tile, int half, int thread) {
  const Ring<FusedShared::STAGES> ring{index};
  const int stage = ring.stage(0);
  wait_for(s.outputs_ready[stage], ring.parity(0));
  if (thread == 0 && !p.padding(tile.state)) {
    const uint32_t from = shared_address(&s.stages[stage]);
    if constexpr (POOL) tma_store_box(states, tile.row, tile.block(p, half), tile.state < 0 ? ~tile.state : tile.state, from);
    else tma_store_state(states, tile.row, from);
    bulk_stores_read();
  }
  warp_arrives_at_both(s.empty[stage]);
}

// A segment's chunks in both rings: see consume and store_outputs in inter_chunk_sm90.cuh.
struct PairChunks {
  static constexpr bool ALL_AT_ONCE = false;
  FusedShared& s;
  Ring<FusedShared::KEYS> keys;
  Ring<FusedShared::STAGES> ring;
  __device__ __forceinline__ PairChunks(FusedShared& s_, int done, int states) : s(s_), keys{done}, ring{done + states} {}
  __device__ __forceinline__ ChunkTiles tiles(int chunk) const {
    KeyStage& here = s.keys[keys.stage(chunk)];
    ValueStage& stage = s.stages[ring.stage(chunk)];
    return {here.k, stage.q, stage.v[0], here.T, shared_address(stage.M)};
  }
  __device__ __forceinline__ void wait_for_keys(int chunk) const { wait_for(s.keys_full[keys.stage(chunk)], keys.parity(chunk)); }
  __device__ __forceinline__ void wait_for_values(int chunk) const { wait_for(s.full[ring.stage(chunk)], ring.parity(chunk)); }
  __device__ __forceinline__ void wait_for_t(int chunk) const { wait_for(s.t_ready[keys.stage(chunk)], keys.parity(chunk)); }
  __device__ __forceinline__ void wait_for_m(int chunk) const { wait_for(s.m_ready[ring.stage(chunk)], ring.parity(chunk)); }
  __device__ __forceinline__ void state_complete(int chunk) const { warp_arrives_at_both(s.keys_empty[keys.stage(chunk)]); }
  __device__ __forceinline__ void outputs_written(int chunk) const { warp_arrives(s.outputs_ready[ring.stage(chunk)]); }
  __device__ __forceinline__ void sync() const { named_barrier_sync<128>(1); }
  __device__ __forceinline__ void wait_for_outputs(int chunk) const {
    wait_for(s.outputs_ready[ring.stage(chunk)], ring.parity(chunk));
  }
  __device__ __forceinline__ void free(int chunk) const { warp_arrives_at_both(s.empty[ring.stage(chunk)]); }
};

// The order of the sequences, the same in each CTA: by number of chunks, longest first, equal ones as they come. By all threads.
__device__ __forceinline__ void sort_sequences(const Prefill& p, FusedShared& s) {
  FusedSequence own{};
  const int n = threadIdx.x;
  uint32_t key = 0;
  if (n < p.N) {
    const int begin = p.border(n);
    own = {n, begin, max(p.border(n + 1) - begin, 0), p.state_of(n)};
    key = static_cast<uint32_t>(min((own.tokens + CHUNK - 1) / CHUNK, (1 << 22) - 1)) << 10 | (1023 - n);
  }
  if (n < FUSED_SEQUENCES) s.lengths[n] = key;
  __syncthreads();
  if (n >= p.N) return;
  int place = 0;
#pragma unroll 4
  for (int i = 0; i < p.N; i += 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(s.lengths + i);
    place += (x.x > key) + (x.y > key) + (x.z > key) + (x.w > key);
  }
  s.order[place] = own;
}

// The tickets of a launch, in memory that has anything before it: whoever sees another launch's number first begins at 0. The last
// one leaves 0, for the same launch once more, in a graph.
__device__ __forceinline__ void open_tickets(unsigned long long* tickets, unsigned long long launch) {
  const unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(tickets);
  if (seen >> 24 != launch) atomicCAS(tickets, seen, launch << 24);
}
__device__ __forceinline__ uint32_t take_ticket(unsigned long long* tickets, uint32_t all) {
  const uint32_t ticket = static_cast<uint32_t>(atomicAdd(tickets, 1ull)) & 0xffffff;
  if (ticket == all - 1) *reinterpret_cast<volatile unsigned long long*>(tickets) = 0;
  return ticket;
}

// Sends the next tile's number to both CTAs: by one thread of each, `turn` tiles after the first.
__device__ __forceinline__ void announce(const Prefill& p, FusedShared& s, int turn, uint32_t tiles) {
  const int slot = turn % FusedShared::TILES;
  if (cluster_rank() == 0) {
    wait_for(s.tile_free[slot], (turn / FusedShared::TILES & 1) ^ 1);
    const uint32_t next = gridDim.x / 2 + take_ticket(p.tickets, tiles);
#pragma unroll
    for (int rank = 0; rank < 2; ++rank)
      store_at_peer(at_peer(shared_address(&s.tile[slot]), rank), next, at_peer(shared_address(&s.tile_ready[slot]), rank));
  }
  mbarrier_arrive_expect_tx(shared_address(&s.tile_ready[slot]), sizeof(uint32_t));
}
__device__ __forceinline__ uint32_t next_tile(FusedShared& s, int turn, bool whole_warp) {
  const int slot = turn % FusedShared::TILES;
  wait_for(s.tile_ready[slot], turn / FusedShared::TILES & 1);
  const uint32_t next = s.tile[slot];
  if (whole_warp) __syncwarp();
  if (!whole_warp || threadIdx.x % 32 == 0) mbarrier_arrive_at_peer(at_peer(shared_address(&s.tile_free[slot]), 0));
  return next;
}
#endif  // FLASHCORE_WGMMA

// Registers by warpgroup: consumers, maker, team, producer; in all what the launch has.
constexpr int FUSED_CONSUMER = 248, FUSED_MAKER = 96, FUSED_PRODUCER = 40;
static_assert(FUSED_CONSUMER + FUSED_MAKER + 65536 / FUSED_THREADS + FUSED_PRODUCER <= 65536 / FUSED_THREADS * 4);

// In clusters of two. grid: two CTAs for each tile, if as many can be resident, else as many as can.
template <bool K_FIRST = false>
__global__ void __launch_bounds__(FUSED_THREADS, 1)
gdn_prefill_fused_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps,
                       const __grid_constant__ CUtensorMap new_states) {
#if FLASHCORE_WGMMA
  constexpr int MAKER = 4, TEAM = 8, PRODUCER = 12;  // their first warps
  auto& s = *reinterpret_cast<FusedShared*>(tile_memory());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), half = cluster_rank();
  const uint32_t tiles = static_cast<uint32_t>(p.N) * p.HV;
  const bool ordered = gridDim.x < 2 * tiles;
  float S[16][4];
  if (warp == PRODUCER && elect_one()) {
    prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v), prefetch_tensor_map(maps.q);
    if (ordered) {
      prefetch_tensor_map(maps.state), prefetch_tensor_map(new_states);
      // of the first tile, if lengths are equal
      if (!POOL) prefetch_l2(p.rows(static_cast<int64_t>(blockIdx.x) * GROUP_ROWS), GROUP_ROWS * HEAD_DIM * sizeof(float));
    }
  }
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < FusedShared::KEYS; ++i) {
      mbarrier_init(shared_address(&s.keys_full[i]), 1), mbarrier_init(shared_address(&s.gates_ready[i]), ARRIVALS);
      mbarrier_init(shared_address(&s.t_ready[i]), GROUP_ARRIVALS), mbarrier_init(shared_address(&s.keys_empty[i]), 2 * 4 * ARRIVALS);
    }
#pragma unroll
    for (int i = 0; i < FusedShared::STAGES; ++i) {
      mbarrier_init(shared_address(&s.full[i]), 1), mbarrier_init(shared_address(&s.m_ready[i]), GROUP_ARRIVALS + 4 * ARRIVALS);
      mbarrier_init(shared_address(&s.outputs_ready[i]), 4 * ARRIVALS);
      mbarrier_init(shared_address(&s.empty[i]), 2 * STORE_WARPS * ARRIVALS);
    }
#pragma unroll
    for (int i = 0; i < FusedShared::TILES; ++i)
      mbarrier_init(shared_address(&s.tile_ready[i]), 1), mbarrier_init(shared_address(&s.tile_free[i]), FusedShared::READERS);
    mbarrier_init_fence();
  }
  if (ordered) sort_sequences(p, s);
  __syncthreads();
  cluster_sync();
  const auto segment_of = [&](uint32_t number) {
    const int place = number / p.HV, hv = number - place * p.HV;
    if (ordered) {
      const FusedSequence x = s.order[place];
      return Segment(p, hv, x.n, x.first, x.tokens, x.state);
    }
    const int first = p.border(place);
    return Segment(p, hv, place, first, max(p.border(place + 1) - first, 0), p.state_of(place));
  };
  int done = 0, states = 0;  // chunks, and tiles before this one: as many states have come through the ring, with this one's
  const auto for_each_tile = [&](bool whole_warp, const auto& code, const auto& end) {
    uint32_t number = blockIdx.x / 2;
#pragma unroll 1
    for (;;) {
      const Segment at = segment_of(number);
      code(at);
      if (ordered) number = next_tile(s, states, whole_warp);
      if (!ordered || number >= tiles) return end(at);
      done += at.count, ++states;
    }
  };
  const auto nothing = [](const Segment&) {};
  if (warp >= PRODUCER) {
    warpgroup_reg_dealloc<FUSED_PRODUCER>();
    const int other = warp - PRODUCER;
    if (other == 0) {
      if (elect_one()) {
        for_each_tile(false, [&](const Segment& at) {
          if (states > 0) load_state_stage<K_FIRST>(p, maps, s, done + states - 1, at, half);
          const auto open = [&] {
            if (ordered && states == 0 && half == 0) open_tickets(p.tickets, p.launch);
          };
          const auto take = [&] {
            if (ordered) announce(p, s, states, tiles);
          };
          const bool at_once = at.count < 2;  // there is no chunk between the first and the last
          if (at_once) open();
          if (at.count == 0) take();
          load_values(maps, s, done, states, at, half, [&] { if (!at_once) open(); }, take);
        }, [&](const Segment& at) {
          wait_for_the_last(s.empty, done + states + at.count);
          if (ordered && half == 0) wait_for_the_last(s.tile_free, states + 1);
        });
      }
    } else if (other == STORE_WARPS + 1) {
      for_each_tile(true, [&](const Segment& at) { make_gates(p, maps, s, done, at); },
                    [&](const Segment& at) { wait_for_the_last(s.keys_empty, done + at.count); });
    } else {
      const int thread = threadIdx.x - (PRODUCER + 1) * 32;
      TileState<K_FIRST> before(p, segment_of(blockIdx.x / 2), half);
      for_each_tile(true, [&](const Segment& at) {
        if (states > 0) store_state_stage<K_FIRST>(p, new_states, s, done + states - 1, before, half, thread);
        before = TileState<K_FIRST>(p, at, half);
        store_outputs<1, 8>(p, PairChunks(s, done, states), at, half, thread);
      }, nothing);
    }
  } else if (warp >= TEAM) {
    for_each_tile(true, [&](const Segment& at) { make_t(p, s, done, at); }, nothing);
  } else if (warp >= MAKER) {
    warpgroup_reg_dealloc<FUSED_MAKER>();
    for_each_tile(true, [&](const Segment& at) {
      if (states > 0) {
        const Ring<FusedShared::STAGES> ring{done + states - 1};
        wait_for(s.full[ring.stage(0)], ring.parity(0));  // the state: no phase without a wait
        warp_arrives(s.m_ready[ring.stage(0)]);
      }
      make_m_fused(p, s, done, states, at);
    }, nothing);
  } else {
    warpgroup_reg_alloc<FUSED_CONSUMER>();
    for_each_tile(true, [&](const Segment& at) {
      const int row = half * GROUP_ROWS + thread_again() / 32 * 16, lane = thread_again() % 32;
      if (states > 0) exchange_state<K_FIRST>(S, p, s, done + states - 1, at.state, row - half * GROUP_ROWS, lane);
      else load_state<K_FIRST>(S, at.original(), row, 0, lane);
      if constexpr (POOL) warpgroup_fence_operand(S);
      consume<true, false>(S, p, PairChunks(s, done, states), at, true);
    }, [&](const Segment& at) {
      store_state<K_FIRST>(at.end(), S, half * GROUP_ROWS + thread_again() / 32 * 16, 0, thread_again() % 32);
    });
  }
#endif
}

}  // namespace gdn
