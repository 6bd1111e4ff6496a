// Which accesses to shared memory nothing orders: the emulator tells races.cpp here what orders them. Threads, copies by TMA and
// products have a number. Without EMULATED_RACES all of this is empty.
#pragma once

#include <cstddef>
#include <string>

namespace emulated::races {

#ifdef EMULATED_RACES

constexpr bool SEARCHED = true;
void begin(char* memory, size_t bytes, size_t behind, int threads);  // of a CTA: its static variables begin at `behind`
void switch_to(int thread);             // -1: the scheduler
void release(const void* barrier, unsigned generation);
void acquire(const void* barrier, unsigned generation);
int start();                            // of a copy, by the running thread; returns its number
void end(int who);                      // the running thread has waited for it
int start_of_warp(int first);           // of a product; it comes after what is before all lanes of the warp
void end_of_warp(int first, int who);
void access(const void* p, size_t bytes, bool write, int thread = -1, void* code = nullptr);  // -1: the running one
void atomic(const void* p, size_t bytes, void* code);
std::string told(int threads, std::string (*place)(const void*));  // what was found since the last call, a line each
int set_aside();                        // ends Ignored for another thread; returns what set_back needs
void set_back(int);
struct As {                             // accesses in its scope are of that copy or product
  int before;
  explicit As(int who);
  ~As();
};
struct Ignored {                        // accesses in its scope are the emulator's own
  Ignored();
  ~Ignored();
};

#else

constexpr bool SEARCHED = false;
inline void begin(char*, size_t, size_t, int) {}
inline void switch_to(int) {}
inline void release(const void*, unsigned) {}
inline void acquire(const void*, unsigned) {}
inline int start() { return 0; }
inline int start_of_warp(int) { return 0; }
inline void end(int) {}
inline void end_of_warp(int, int) {}
inline void access(const void*, size_t, bool, int = -1, void* = nullptr) {}
inline void atomic(const void*, size_t, void*) {}
inline std::string told(int, std::string (*)(const void*)) { return {}; }
inline int set_aside() { return 0; }
inline void set_back(int) {}
struct As {
  explicit As(int) {}
};
struct Ignored {
  Ignored() {}
};

#endif

}  // namespace emulated::races
