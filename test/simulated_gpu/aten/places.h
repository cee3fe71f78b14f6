// Places in the program, in Python mostly, that issue operations.
//
// A place is the stack of Python's frames of the issuing thread and, in a backward pass, the node that runs.
// Finding it takes Python's global interpreter lock (GIL), its text() takes no lock and runs no Python, so
// reports may be written on any thread, also at the interpreter's end.
//
// A thread finds no place where it is not known to Python, as NCCL's watchdog is not; while Python is not
// there or ends; and within a WithoutPlaces.
#pragma once

#include <memory>

#include "simulated_gpu.h"

namespace simulated_gpu::aten {

// Null where no place is found. The caller holds no lock that a thread with the GIL may wait for.
std::shared_ptr<const IssuePlace> find_issue_place();

// Finds the place once for all that this thread issues while the object lives, the outermost one if nested.
// Work issued under a lock gets its place this way, too.
class AtOnePlace {
 public:
  AtOnePlace();
  ~AtOnePlace();
  AtOnePlace(const AtOnePlace&) = delete;
  AtOnePlace& operator=(const AtOnePlace&) = delete;

 private:
  bool is_outermost_;
};

// While it lives, this thread takes no GIL: it holds a lock that a thread with the GIL may wait for.
class WithoutPlaces {
 public:
  WithoutPlaces();
  ~WithoutPlaces();
  WithoutPlaces(const WithoutPlaces&) = delete;
  WithoutPlaces& operator=(const WithoutPlaces&) = delete;
};

}  // namespace simulated_gpu::aten
