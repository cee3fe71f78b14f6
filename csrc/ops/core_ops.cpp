// Ops that newer PyTorch minors have in _c10d_functional and the running one lacks: defined there when
// this library is loaded, with the semantics they have in PyTorch. Results are plain tensors whose Work is
// in PyTorch's registry until wait_tensor takes it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "ops/collectives.h"

namespace funcol {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor isend(const at::Tensor& tensor, int64_t destination, int64_t tag, std::string_view group) {
  return as_registered(start_send(tensor, destination, tag, group_from_name(group, "isend")))[0];
}

at::Tensor irecv(const at::Tensor& tensor, int64_t source, int64_t tag, std::string_view group) {
  return as_overwritten(start_receive(tensor, source, tag, group_from_name(group, "irecv")))[0];
}

Tensors batch_p2p_ops(const std::vector<std::string>& kinds, at::IntArrayRef peers, at::IntArrayRef tags,
                      at::TensorList tensors, std::string_view group) {
  return as_overwritten(
      start_batch_p2p(kinds, peers, tags, tensors, group_from_name(group, "batch_p2p_ops")));
}

Tensors wait_tensors(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    wait_tensor(tensor);
  }
  return tensors.vec();
}

at::Tensor isend_meta(const at::Tensor& tensor, int64_t, int64_t, std::string_view) {
  return at::empty({0}, tensor.options());
}

at::Tensor irecv_meta(const at::Tensor& tensor, int64_t, int64_t, std::string_view) {
  return at::empty_like(tensor);
}

Tensors batch_p2p_ops_meta(const std::vector<std::string>& kinds, at::IntArrayRef, at::IntArrayRef,
                           at::TensorList tensors, std::string_view) {
  Tensors results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    results.push_back(kinds.at(i) == "irecv" ? tensors[i] : at::empty({0}, tensors[i].options()));
  }
  return results;
}

Tensors wait_tensors_meta(at::TensorList tensors) { return tensors.vec(); }

template <typename Kernel, typename MetaKernel>
void define_if_missing(torch::Library& m, const char* name, const char* schema, Kernel kernel,
                       MetaKernel meta) {
  if (c10::Dispatcher::singleton().findSchema({std::string("_c10d_functional::") + name, ""})) {
    return;
  }
  m.def(schema, {at::Tag::pt2_compliant_tag});
  m.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel));
  m.impl(name, torch::dispatch(c10::DispatchKey::Meta, meta));
}

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_FRAGMENT(_c10d_functional, m) {
  using namespace funcol;  // NOLINT(google-build-using-namespace)
  define_if_missing(m, "isend", "isend(Tensor tensor, int dst, int tag, str group_name) -> Tensor", isend,
                    isend_meta);
  define_if_missing(m, "irecv", "irecv(Tensor tensor, int src, int tag, str group_name) -> Tensor", irecv,
                    irecv_meta);
  define_if_missing(m, "batch_p2p_ops",
                    "batch_p2p_ops(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str "
                    "group_name) -> Tensor[]",
                    batch_p2p_ops, batch_p2p_ops_meta);
  define_if_missing(m, "wait_tensors", "wait_tensors(Tensor[] tensors) -> Tensor[]", wait_tensors,
                    wait_tensors_meta);
}
