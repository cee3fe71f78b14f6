// A group's streams, its collectives, and its training state.
//
// On a device with streams, the calls of streams and events are those of PyTorch's own functions, in the same
// order. On the CPU there are no streams, so nothing is ordered. A collective starts on its process group
// directly, without FSDP2's Python functions in between. If a program has replaced the CPU's stream
// functions, or FSDP2's functions of collectives, they are called.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "async/in_flight.h"
#include "async/pending_collective.h"
#include "comm/backend_call.h"
#include "comm/call_site.h"
#include "fsdp/param_group_view.h"
#include "pyobjects/arguments.h"
#include "pyobjects/attributes.h"
#include "pyobjects/context_guard.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {

inline constexpr AttributeName kCollectives("torch.distributed.fsdp._fully_shard._fsdp_collectives");
inline constexpr AttributeName kGroups("torch.distributed.fsdp._fully_shard._fsdp_param_group");

template <AttributeName name>
py::object call_method(py::handle object) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), interned<name>()));
}

template <AttributeName name>
py::object call_method(py::handle object, py::handle argument) {
  return checked(PyObject_CallMethodOneArg(object.ptr(), interned<name>(), argument.ptr()));
}

// Returns a member of the enum TrainingState.
template <AttributeName name>
py::handle training_state() {
  static auto* const state = attribute<name>(imported<kGroups, "TrainingState">()).release().ptr();
  return state;
}

template <AttributeName name>
bool is_in_state(const Fields& group) {
  return group.get<"_training_state">().is(training_state<name>());
}

inline void set_state(const Fields& group, py::handle state) { group.set<"_training_state">(state.ptr()); }

// The streams of a group's device. On the CPU they are None, and no function does anything.
class Streams {
 public:
  explicit Streams(const Fields& group) : handle_(group.get<"device_handle">()) {
    has_streams_ = !(handle_.is(imported<"torch", "cpu">()) && fully_shard().streams.are_unchanged());
  }

  explicit operator bool() const { return has_streams_; }

  py::object current() const { return has_streams_ ? call_method<"current_stream">(handle_) : py::none(); }

  py::object new_event() const { return call_method<"Event">(handle_); }

  py::object recorded_event(py::handle stream) const {
    return has_streams_ ? call_method<"record_event">(stream) : py::none();
  }

  void wait_for_stream(py::handle stream, py::handle other) const {
    if (has_streams_) {
      call_method<"wait_stream">(stream, other);
    }
  }

  void wait_for_event(py::handle stream, py::handle event) const {
    if (has_streams_) {
      call_method<"wait_event">(stream, event);
    }
  }

  // Returns the context in which `stream` is the current one, or null on the CPU.
  py::object context(py::handle stream) const {
    return has_streams_ ? call_method<"stream">(handle_, stream) : py::object();
  }

 private:
  py::object handle_;
  bool has_streams_ = true;
};

// The object that allocates the output of a group's collective and starts the collective: FSDP2's own, or one
// that a program has set.
class Comm {
 public:
  Comm(py::object comm, py::handle own_type) : comm_(std::move(comm)) {
    const auto& pending = imported<"torch.distributed.distributed_c10d", "_world">();
    is_own_ = py::type::handle_of(comm_).is(own_type) && fully_shard().collectives.are_unchanged() &&
              PyObject_Size(attribute<"pg_coalesce_state">(pending).ptr()) == 0;
  }

  py::object allocate(int64_t length, const py::object& dtype, const py::object& device) const {
    if (is_own_) {
      const auto options = at::TensorOptions()
                               .dtype(to_dtype(dtype))
                               .device(reinterpret_cast<THPDevice*>(device.ptr())->device);
      return to_python(at::empty({length}, options));
    }
    return attribute<"allocate">(comm_)(py::make_tuple(length), py::arg("dtype") = dtype,
                                        py::arg("device") = device);
  }

  // Starts the collective by `start`, (backend or process group, output, input) -> c10d Work, and waits for
  // it. `op` is its name in reports of what is in flight.
  template <typename Start>
  void run_own(const char* op, py::handle group, py::handle output, py::handle input,
               const Start& start) const {
    const auto process_group = group_object(group.ptr());
    auto to = THPVariable_Unpack(output.ptr());
    auto from = THPVariable_Unpack(input.ptr());
    const WithoutGil without_gil;
    auto work =
        on_backend(*process_group, to.device().type(), [&](auto& target) { return start(target, to, from); });
    if (!work) {
      return;
    }
    funcol::StartedCollective started{op, process_group, std::move(work), {from}, {to}, {}};
    started.is_counted = false;
    if (to.is_cpu()) {  // an error names the collective
      c10::make_intrusive<PendingCollective>(std::move(started))->settle();
      return;
    }
    UnwaitedEntry in_flight;
    in_flight.enter(started);
    started.work->wait();
  }

  bool can_run_own(py::handle group, py::handle tensor) const {
    return is_own_ && group_object(group.ptr()) && !THPVariable_Unpack(tensor.ptr()).is_complex() &&
           !c10d::allow_inflight_collective_as_graph_input();
  }

  const py::object& object() const { return comm_; }

 private:
  py::object comm_;
  bool is_own_;
};

inline bool has_replicas(py::handle mesh_info) {
  return py::type::handle_of(mesh_info).is(imported<kGroups, "HSDPMeshInfo">());
}

inline bool is_sharded_mesh(py::handle mesh_info) {
  return py::type::handle_of(mesh_info).is(imported<kGroups, "FSDPMeshInfo">()) || has_replicas(mesh_info);
}

// Returns true if fast_path_is_enabled() and no profiler is active: the methods of groups record ranges.
inline bool group_fast_path_is_enabled() { return fast_path_is_enabled() && !at::hasCallbacks(); }

// Returns `find(object, function)`, such as unmodified_group(), while group_fast_path_is_enabled(), otherwise
// nullopt.
template <auto find>
auto on_group_fast_path(py::handle object, ReplacedFunction function) {
  return group_fast_path_is_enabled() ? find(object.ptr(), function) : std::nullopt;
}

}  // namespace funcol::python
