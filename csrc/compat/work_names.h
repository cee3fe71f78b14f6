// Names of Works in profiles: only newer PyTorch releases have them.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

// Beside c10d, not inside funcol, so that lookup finds both. Overload resolution prefers c10d's functions,
// which are not templates, to these.
namespace funcol_without_work_names {

template <typename... None>
void set_comm_profiling_name(const std::string& /*name*/, const None&... /*none*/) {}
template <typename... None>
std::string get_comm_profiling_name(const None&... /*none*/) {
  return {};
}

}  // namespace funcol_without_work_names

namespace funcol::compat {

namespace detail {

namespace either {
using namespace c10d;                         // NOLINT(google-build-using-namespace)
using namespace ::funcol_without_work_names;  // NOLINT(google-build-using-namespace)

inline void set(const std::string& name) { set_comm_profiling_name(name); }
inline std::string get() { return get_comm_profiling_name(); }
}  // namespace either

}  // namespace detail

// Returns the name that profiles show for the Works that this thread starts. Empty for the backend's own
// name, such as "gloo:all_reduce", and in PyTorch releases without such names.
inline std::string work_name() { return detail::either::get(); }
inline void set_work_name(const std::string& name) { detail::either::set(name); }

}  // namespace funcol::compat
