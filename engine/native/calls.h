// Calls of kernels, kept by engine/native/calls.py and made again without Python between them.
//
// An exported kernel wraps its work in `kept`: all it reads and writes by addresses given to it, which stay the same.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

using Calls = std::vector<std::function<void()>>;

static thread_local Calls* keeping = nullptr;  // where this library keeps the calls of this thread, or null
static thread_local const int64_t* most_tokens = nullptr;  // of the calls kept from now on, or null: all
static thread_local int64_t all_tokens = 1;

// The rows of a kernel, of all tokens, or of as many as stand at `most` when the call is made.
struct Rows {
    int64_t all;
    const int64_t* most = most_tokens;
    int64_t tokens = all_tokens;
    operator int64_t() const { return most ? all / tokens * *most : all; }
};

template <typename Work>
inline void kept(Work work) {
    if (keeping) keeping->push_back(work);
    work();
}

extern "C" {

Calls* new_calls() { return new Calls; }
void free_calls(Calls* calls) { delete calls; }
int num_calls(const Calls* calls) { return calls->size(); }
void keep_calls(Calls* calls) {  // null: no longer
    keeping = calls;
    most_tokens = nullptr;
}
void replay_calls(const Calls* calls, int first, int last) {
    for (int i = first; i < last; i++) (*calls)[i]();
}

}  // extern "C"
