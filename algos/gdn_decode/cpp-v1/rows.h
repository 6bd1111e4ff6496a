// Four rows of the state at a time, one pass: read S, both dots, write S'. One version per instruction set, chosen when
// the program runs, because the builder passes no -march flag.
//
//   x = S k,  y = S q  (old S);  d = beta (v - g x);  o = scale (g y + d k.q);  S' = g S + d k^T
//
// The four rows (2 KiB) are read from memory for the dots and again from L1 for the update. Rows come four at a time so
// that the eight sums over lanes, serial in themselves, become one small transposition.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GDN_X86 1
#include <immintrin.h>
#endif

namespace gdn {

constexpr int K = 128, STEP = 4;

// What the rows of one value head of one batch element share.
struct Head {
  alignas(64) float k[K];
  alignas(64) float q[K];
  float kq, g, beta, scale;
};

inline float from_bf16(uint16_t x) {
  const uint32_t u = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t to_bf16(float f) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN: rounding its payload up could make it infinite
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// From the dots of four rows to their corrections d and outputs o.
inline void finish(const Head& h, const float* x, const float* y, const uint16_t* v, float* d, uint16_t* o) {
  for (int r = 0; r < STEP; ++r) {
    d[r] = h.beta * (from_bf16(v[r]) - h.g * x[r]);
    o[r] = to_bf16(h.scale * (h.g * y[r] + d[r] * h.kq));
  }
}

// s, n: [rows, K] f32, old and new state; v, o: [rows] bf16; rows is a multiple of STEP.
using Rows = void (*)(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows);

typedef float f32x4 __attribute__((vector_size(16)));  // GCC's and Clang's own vectors: SSE2, NEON, VSX

inline void rows_portable(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows) {
  for (int i = 0; i < rows; i += STEP, s += STEP * K, n += STEP * K) {
    float x[STEP], y[STEP], d[STEP];
    for (int r = 0; r < STEP; ++r) {
      f32x4 x4[2] = {}, y4[2] = {};
      for (int c = 0; c < K; c += 8) {
        for (int j = 0; j < 2; ++j) {
          f32x4 a, k, q;
          std::memcpy(&a, s + r * K + c + 4 * j, 16);
          std::memcpy(&k, h.k + c + 4 * j, 16);
          std::memcpy(&q, h.q + c + 4 * j, 16);
          x4[j] += a * k;
          y4[j] += a * q;
        }
      }
      x4[0] += x4[1];
      y4[0] += y4[1];
      x[r] = (x4[0][0] + x4[0][1]) + (x4[0][2] + x4[0][3]);
      y[r] = (y4[0][0] + y4[0][1]) + (y4[0][2] + y4[0][3]);
    }
    finish(h, x, y, v + i, d, o + i);
    for (int r = 0; r < STEP; ++r) {
      for (int c = 0; c < K; c += 4) {
        f32x4 a, k;
        std::memcpy(&a, s + r * K + c, 16);
        std::memcpy(&k, h.k + c, 16);
        a = h.g * a + d[r] * k;
        std::memcpy(n + r * K + c, &a, 16);
      }
    }
  }
}

#ifdef GDN_X86
#define GDN_AVX2 __attribute__((target("avx2,fma")))
#define GDN_AVX512 __attribute__((target("avx512f,avx2,fma")))

// The sums over the lanes of a, b, c, d.
GDN_AVX2 inline __m128 sums(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

template <bool STREAM>
GDN_AVX2 void rows_avx2(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows) {
  for (int i = 0; i < rows; i += STEP, s += STEP * K, n += STEP * K) {
    __m256 x8[STEP], y8[STEP];
#pragma GCC unroll 4
    for (int r = 0; r < STEP; ++r) x8[r] = y8[r] = _mm256_setzero_ps();
    for (int c = 0; c < K; c += 8) {
      const __m256 k = _mm256_load_ps(h.k + c), q = _mm256_load_ps(h.q + c);
#pragma GCC unroll 4
      for (int r = 0; r < STEP; ++r) {
        const __m256 a = _mm256_loadu_ps(s + r * K + c);
        x8[r] = _mm256_fmadd_ps(a, k, x8[r]);
        y8[r] = _mm256_fmadd_ps(a, q, y8[r]);
      }
    }
    float x[STEP], y[STEP], d[STEP];
    _mm_storeu_ps(x, sums(x8[0], x8[1], x8[2], x8[3]));
    _mm_storeu_ps(y, sums(y8[0], y8[1], y8[2], y8[3]));
    finish(h, x, y, v + i, d, o + i);
    const __m256 g = _mm256_set1_ps(h.g);
    for (int r = 0; r < STEP; ++r) {
      const __m256 d8 = _mm256_set1_ps(d[r]);
#pragma GCC unroll 4
      for (int c = 0; c < K; c += 8) {
        const __m256 a = _mm256_mul_ps(g, _mm256_loadu_ps(s + r * K + c));
        const __m256 b = _mm256_fmadd_ps(d8, _mm256_load_ps(h.k + c), a);
        if (STREAM) _mm256_stream_ps(n + r * K + c, b);
        else _mm256_storeu_ps(n + r * K + c, b);
      }
    }
  }
  if (STREAM) _mm_sfence();  // streaming stores are not ordered by the release that tells of them
}

GDN_AVX512 inline __m256 fold(__m512 a) {
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(a), upper);
}

template <bool STREAM>
GDN_AVX512 void rows_avx512(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows) {
  constexpr int C = K / 16;
  __m512 k[C], q[C];  // 16 of the 32 registers
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) k[c] = _mm512_load_ps(h.k + c * 16), q[c] = _mm512_load_ps(h.q + c * 16);
  const __m512 g = _mm512_set1_ps(h.g);
  for (int i = 0; i < rows; i += STEP, s += STEP * K, n += STEP * K) {
    __m512 x16[STEP], y16[STEP];
#pragma GCC unroll 4
    for (int r = 0; r < STEP; ++r) x16[r] = y16[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
      for (int r = 0; r < STEP; ++r) {
        const __m512 a = _mm512_loadu_ps(s + r * K + c * 16);
        x16[r] = _mm512_fmadd_ps(a, k[c], x16[r]);
        y16[r] = _mm512_fmadd_ps(a, q[c], y16[r]);
      }
    }
    float x[STEP], y[STEP], d[STEP];
    _mm_storeu_ps(x, sums(fold(x16[0]), fold(x16[1]), fold(x16[2]), fold(x16[3])));
    _mm_storeu_ps(y, sums(fold(y16[0]), fold(y16[1]), fold(y16[2]), fold(y16[3])));
    finish(h, x, y, v + i, d, o + i);
#pragma GCC unroll 4
    for (int r = 0; r < STEP; ++r) {
      const __m512 d16 = _mm512_set1_ps(d[r]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const __m512 a = _mm512_mul_ps(g, _mm512_loadu_ps(s + r * K + c * 16));
        const __m512 b = _mm512_fmadd_ps(d16, k[c], a);
        if (STREAM) _mm512_stream_ps(n + r * K + c * 16, b);
        else _mm512_storeu_ps(n + r * K + c * 16, b);
      }
    }
  }
  if (STREAM) _mm_sfence();
}
#endif  // GDN_X86

// The fastest version here. stream: new_state will not fit the cache, so write past it; `n` must then be 64-byte aligned.
inline Rows pick_rows(bool stream) {
#ifdef GDN_X86
  static const bool avx512 = __builtin_cpu_supports("avx512f");
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 && avx2) return stream ? rows_avx512<true> : rows_avx512<false>;
  if (avx2) return stream ? rows_avx2<true> : rows_avx2<false>;
#endif
  (void)stream;
  return rows_portable;
}

}  // namespace gdn
