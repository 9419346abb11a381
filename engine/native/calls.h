// Calls of kernels, kept by engine/native/calls.py and made again without Python between them.
//
// An exported kernel wraps its work in `kept`: all it reads and writes by addresses given to it, which stay the same.

#pragma once

#include <functional>
#include <vector>

using Calls = std::vector<std::function<void()>>;

static thread_local Calls* keeping = nullptr;  // where this library keeps the calls of this thread, or null

template <typename Work>
inline void kept(Work work) {
    if (keeping) keeping->push_back(work);
    work();
}

extern "C" {

Calls* new_calls() { return new Calls; }
void free_calls(Calls* calls) { delete calls; }
int num_calls(const Calls* calls) { return calls->size(); }
void keep_calls(Calls* calls) { keeping = calls; }  // null: no longer
void replay_calls(const Calls* calls, int first, int last) {
    for (int i = first; i < last; i++) (*calls)[i]();
}

}  // extern "C"
