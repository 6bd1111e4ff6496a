// Estimates of the lengths, which the host does not know: it knows that N sequences have num_tokens, and one is often much
// longer than the others. Of the contest's batches of 2 to 5 sequences with 1500 tokens and more, nearly all have seven eighths
// of the tokens in one sequence; of those with 13 sequences and more one has an eighth to five sixths.
//
// Figures here are us on an H200 (132 SMs), 4 query/key and 8 value heads, L2 cold, from tuning.json, or from the ladder where
// it is named (algos/gdn_prefill/README.md, "By an estimate of the longest sequence"). `recurrent` and `segments` are the
// constants of tuned.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk.cuh"

namespace gdn {

// Estimated tokens of the longest sequence: three times the mean, or a quarter of all. Both factors are chosen from the contest's
// batches. With them and the segments below, 3 of its 100 workloads are more than 5 % slower than the best path; with the mean
// alone 16 were (ladder). 3 and 1/4 not measured alone.
inline int64_t likely_longest(int64_t num_tokens, int64_t N) {
  return std::min(num_tokens, std::max(3 * num_tokens / N, num_tokens / 4));
}

// Whether to use cuda-recurrent's kernel, which is best for sequences of up to `tokens` (`recurrent`): 768 tokens in 3
// sequences 12.5, in chunks 14.8; but 661 in 3 24.7 and 23.3.
//
// With more than 3 sequences times value heads per SM all SMs are busy whatever the longest has, so the mean counts as well: it
// must be at most 48, three quarters of a chunk, since a chunk costs the same however few tokens it has. 2048 tokens in 64
// sequences 33.0, in chunks 36.4; 64x64 42.6 and 37.3 (ladder). 48 is between; it and the 3 not measured alone.
inline bool use_recurrent(int64_t num_tokens, int64_t N, int64_t HV, int64_t tokens, int64_t sms) {
  const bool many = N * HV > 3 * sms;
  return likely_longest(num_tokens, N) <= tokens && (!many || num_tokens / N <= CHUNK * 3 / 4);
}

// Whether there are more half tiles (64 rows of V of a sequence and value head) than SMs. Then no sequence is split, since the GPU
// is full anyway, and launch_sm90_tiles.cu is used. Up to there one half tile per SM is faster: 1.3 us per chunk, a
// whole tile 2.0 (ladder, "Longest first"). The border not measured alone.
inline bool more_than_one_wave(int64_t N, int64_t HV, int64_t sms) { return 2 * N * HV > sms; }

// What the choice between one launch and two needs to know of a device.
struct Rates {
  double bytes;  // that a large copy reads and writes, per us
  double clock;  // of the SMs, MHz, at most
  int64_t sms;
};
constexpr Rates HOME = {4.28e6, 1980, 132};  // an H200, where the times below were measured
// Of what the memory's clock and the width of its bus allow, a large copy reaches so much: H200 4.2 of 4.9 TB/s, H100 3.0 of 3.35.
constexpr double COPY = 0.87;

// Whether whole sequences are done in one launch (inter_chunk_sm90_fused.cuh), where two SMs share a tile, or in two, where one has
// it. By an estimate of both times in us, as if all sequences had the mean length: an H200's by the SMs' clock, and what the bytes take
// longer than there. Of 44 shapes measured on an H200 it chooses the slower way at six, which costs 0.7 to 2.9 %; the rule before, by
// chunks per SM alone, cost 4 to 10 % at seven (ladder, "Which of the two").
//
// More than 16 chunks times value heads per SM: two launches, since what the estimate would choose one for (24x1024) is not measured.
// Not more tiles than pairs of SMs: two launches then have half tiles, and both ways take about the same for a chunk: 8x2048 56.7 in
//   one and 59.5 in two, 16/32 heads 1x2048 (half as many tiles) 55.4 and 55.0.
// From and to a pool two launches as soon as there are more: 64x64 38.8 us and 46.4 in one, 32x256 43.5 and 46.1, 16x512 40.0 and 41.0; but
//   8x1024 41.3 and 38.6 in one (ladder of gdn_prefill_packed).
// ONE_* and TWO_*: what a call costs anyway, a chunk of a tile, another tile; PREPARED: a chunk in the intra-chunk kernel, with all SMs.
// ONE_BYTES, TWO_BYTES: so much of the time that more bytes take, or the same ones on a slower memory, adds to a call's. From an H100
//   (as many SMs, the same clock, 3.0 TB/s; outside timings): one launch 5 to 12 % longer, two 18 to 33 %.
inline bool in_one_launch(int64_t num_tokens, int64_t N, int64_t H, int64_t HV, const Rates& rates) {
  constexpr double ONE_CALL = 5, ONE_CHUNK = 1.65, ONE_TILE = 1.7, ONE_BYTES = 0.35;
  constexpr double TWO_CALL = 14, TWO_CHUNK = 2.07, TWO_TILE = 4.4, PREPARED = 0.48, TWO_BYTES = 0.55;
  const int64_t sms = rates.sms, tiles = N * HV, pairs = sms / 2;
  if (num_tokens / CHUNK * HV > 16 * sms) return false;
  if (tiles <= pairs) return true;
  if (POOL) return false;
  const double chunks = static_cast<double>(num_tokens) / CHUNK / N + 0.5;  // the last is partly filled
  const int64_t rounds = (tiles + pairs - 1) / pairs, whole = (tiles + sms - 1) / sms;
  const double one = ONE_CALL + ONE_CHUNK * chunks * rounds + ONE_TILE * (rounds - 1);
  const double two = TWO_CALL + PREPARED * chunks * tiles / sms + TWO_CHUNK * chunks * whole + TWO_TILE * (whole - 1);
  // Bytes, Q and K once for all value heads that share them: in one launch Q, K, V, outputs and states; in two K again, T written and read.
  const double number = chunks * tiles, shared = static_cast<double>(H) / HV;
  const double one_bytes = number * (2 + 2 * shared) * QK_TILE + 2.0 * tiles * HEAD_DIM * HEAD_DIM * sizeof(float);
  const double two_bytes = one_bytes + number * (2 * MATRIX + shared * QK_TILE);
  const double slower = HOME.clock / rates.clock, longer = 1 / rates.bytes - 1 / HOME.bytes;
  return one * slower + ONE_BYTES * one_bytes * longer < two * slower + TWO_BYTES * two_bytes * longer;
}

// Segment length in chunks; 0: no sequence is split. Splits all tokens, as if they were one sequence, into `segments` / HV parts.
// 1x8192 in 8 parts 70.0, in 5 77.4, unsplit 172.5; 3028 in 5 sequences in 5 parts 44.5, unsplit 64.6.
//
// parts < 3: not in two parts, since the transfer of one half and then the other half take as long as the whole. Reasoned, not
//   measured alone.
// SHORTEST_CUT: fewer chunks are not split, since four launches and half as many products again cost more than they save. 1x1377
//   (21 chunks) split 32.8, unsplit 37.1; split from 16 chunks on, 1x1024 became 31.0 instead of 28.8 and 2x1024 34.1 instead of
//   30.3 (ladder, "More and shorter segments").
// SHORTEST_SEGMENT: the same balance for a part. 16 parts of 1x32768 instead of 8: 202.1 and 204.5, within the scatter; 8
//   itself not measured alone.
// SOME_LENGTH, and 5 N HV > sms: no part is shorter than the mean if that is at least SOME_LENGTH chunks and such sequences
//   fill two fifths of the SMs with two halves each: then equal lengths are not split. They pay for two launches without
//   work (4x2048 61.2, without them 55.5), and 7000 + 400 + 400 + 392 tokens take 91.2 instead of 153.8. 12 and 5 not measured
//   alone.
//
// And only with wgmma (`forgets`), since there gates that forget save most of the products (context_parallel.cuh):
//
// full: as many parts as SMs can have a whole tile each, if those are not short: one sequence, or few heads.
// two: at least two parts for equally long sequences, if half tiles of them all fit on the SMs. A chunk of the transfer takes 0.85 us and
//   one of the inter-chunk kernel 1.4, and with two parts there is no Phi.
//
// Memory: 8 KB per chunk and value head, 16 with mma.sync, and 128 KB per segment and value head.
constexpr int SHORTEST_SEGMENT = 8, SOME_LENGTH = 12, SHORTEST_CUT = 20;  // chunks
constexpr int FULL_SEGMENT = 32;  // 16: 1x16384 91 instead of 114 us with usual gates, but 126 where nothing decays
inline int segment_chunks(int64_t num_tokens, int64_t N, int64_t HV, int segments, int64_t sms, bool forgets) {
  const int64_t chunks = num_tokens / CHUNK, mean = chunks / N, usual = segments / HV, wave = sms / HV;
  const bool few = N == 1 || 5 * N * HV <= sms, split = usual >= 3;
  forgets = forgets && segments > 0;
  const bool full = forgets && few && wave >= 3 && chunks >= FULL_SEGMENT * wave;
  const bool two = forgets && !full && (N == 1 ? !split : !few) && 4 * N * HV <= sms && mean >= (split ? 32 : 48);  // 4x1024: 42 instead of 39 us
  const int64_t parts = std::max(usual, full ? wave : two ? 2 * N : 0);
  if (parts < (two ? 2 : 3) || chunks < SHORTEST_CUT || more_than_one_wave(N, HV, sms)) return 0;
  const int64_t whole = few || mean < SOME_LENGTH ? SHORTEST_SEGMENT : two ? (mean + 1) / 2 : mean;
  return static_cast<int>(std::max(whole, (chunks + parts - 1) / parts));
}

}  // namespace gdn
