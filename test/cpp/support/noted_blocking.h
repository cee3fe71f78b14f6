// Notes what goes through run_blocking(), while one lives.
#pragma once

#include "comm/gil_release.h"

namespace funcol::test {

class NotedBlocking {
 public:
  NotedBlocking() {
    num_runs = 0;
    set_run_blocking([](void (*blocking)(void*), void* context) {
      ++num_runs;
      is_inside = true;
      blocking(context);
      is_inside = false;
    });
  }
  ~NotedBlocking() {
    set_run_blocking([](void (*blocking)(void*), void* context) { blocking(context); });
  }
  NotedBlocking(const NotedBlocking&) = delete;
  NotedBlocking& operator=(const NotedBlocking&) = delete;

  static inline int num_runs = 0;
  static inline bool is_inside = false;
};

}  // namespace funcol::test
