// What the host takes lengths to be, which it does not know: num_tokens belong to N sequences, and one of those is often much
// longer than the others. Of the contest's batches of 2 to 5 sequences with 1500 tokens and more, nearly all have seven eighths
// of them in one; of 13 sequences and more one has an eighth to five sixths.
//
// Figures here are us on an H200 (132 SMs), 4 query/key and 8 value heads, L2 cold, from tuning.json where nothing else is said,
// else from the ladder (algos/gdn_prefill/README.md, "By what the longest sequence may be"). `recurrent` and `segments` are the
// constants of tuned.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk.cuh"

namespace gdn {

// Tokens that the longest sequence may well have: three times the mean, or a quarter of all. Both are guesses from the contest's
// batches. With them and the segments below, 3 of its 100 workloads are more than 5 % from the best way; by the mean alone 16 were
// (ladder). 3 and 1/4 not measured alone.
inline int64_t likely_longest(int64_t num_tokens, int64_t N) {
  return std::min(num_tokens, std::max(3 * num_tokens / N, num_tokens / 4));
}

// Whether cuda-recurrent's kernel is to have them, which is best up to `tokens` (`recurrent`) of a sequence: 768 tokens in 3
// sequences 12.5, by chunks 14.8; but 661 in 3 24.7 and 23.3.
//
// With more than 3 sequences and value heads for each SM all SMs are busy whatever the longest has, so the mean counts as well: it
// must be at most 48, three quarters of a chunk, since a chunk costs the same however few tokens it has. 2048 tokens in 64
// sequences 33.0, by chunks 36.4; 64x64 42.6 and 37.3 (ladder). 48 lies between; it and the 3 not measured alone.
inline bool use_recurrent(int64_t num_tokens, int64_t N, int64_t HV, int64_t tokens, int64_t sms) {
  const bool many = N * HV > 3 * sms;
  return likely_longest(num_tokens, N) <= tokens && (!many || num_tokens / N <= CHUNK * 3 / 4);
}

// Whether not every half tile (64 rows of V of a sequence and value head) can have an SM. Then no sequence is cut, for the GPU is
// full without, and launch_sm90_tiles.cu has them. Up to there a half tile on an SM of its own is quicker: 1.3 us a chunk, a
// whole tile 2.0 (ladder, "Longest first"). The border not measured alone.
inline bool more_than_one_wave(int64_t N, int64_t HV, int64_t sms) { return 2 * N * HV > sms; }

// Chunks of a segment, 0: no sequence is cut. All tokens, as if they were one sequence's, are cut into `segments` / HV parts.
// 1x8192 cut into 8 parts 70.0, into 5 77.4, uncut 172.5; 3028 in 5 sequences cut into 5 parts 44.5, uncut 64.6.
//
// parts < 3: not in two parts, for the transfer of half a sequence and then the other half take as long as the whole. Reasoned, not
//   measured alone.
// SHORTEST_CUT: fewer chunks are not cut, for four launches and half as many products again cost more than they save. 1x1377
//   (21 chunks) cut 32.8, uncut 37.1; cut from 16 chunks on, 1x1024 became 31.0 instead of 28.8 and 2x1024 34.1 instead of 30.3
//   (ladder, "More and shorter segments").
// SHORTEST_SEGMENT: the same balance for a part. 16 parts of 1x32768 instead of 8: 202.1 and 204.5, within the scatter; 8
//   itself not measured alone.
// SOME_LENGTH, and 5 N HV > sms: no part is shorter than the mean where that is at least SOME_LENGTH chunks and such sequences
//   fill two fifths of the SMs with two halves each: equal lengths are then not cut. They pay for two launches that find nothing
//   to do (4x2048 61.2, without them 55.5), and 7000 + 400 + 400 + 392 tokens become 91.2 instead of 153.8. 12 and 5 not measured
//   alone.
//
// Memory is 8 KB a chunk and value head, 16 by mma.sync, and 128 KB a segment and value head.
constexpr int SHORTEST_SEGMENT = 8, SOME_LENGTH = 12, SHORTEST_CUT = 20;  // chunks
inline int segment_chunks(int64_t num_tokens, int64_t N, int64_t HV, int segments, int64_t sms) {
  const int64_t chunks = num_tokens / CHUNK, mean = chunks / N, parts = segments / HV;
  if (parts < 3 || chunks < SHORTEST_CUT || more_than_one_wave(N, HV, sms)) return 0;
  const int64_t whole = mean >= SOME_LENGTH && 5 * N * HV > sms ? mean : SHORTEST_SEGMENT;
  return static_cast<int>(std::max(whole, (chunks + parts - 1) / parts));
}

}  // namespace gdn
