#include "ops/operator.h"

#include <memory>
#include <string_view>

namespace funcol {
namespace {

std::vector<CoreKernel>& all_core_kernels() {
  static std::vector<CoreKernel> kernels;
  return kernels;
}

class BoxedRun final : public c10::OperatorKernel {
 public:
  explicit BoxedRun(StackFunction run) : run_(std::move(run)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    const auto name = unqualified_name(op);
    return_results(op, stack, run_(torch::jit::last(*stack, op.schema().arguments().size()), name.c_str()));
  }

 private:
  StackFunction run_;
};

}  // namespace

Operator::Operator(const OperatorInfo& info)
    : name_(name_in_schema(info.schema)),
      op_(info.op == nullptr ? name_ : info.op),
      library_(torch::Library::FRAGMENT, "funcol", std::nullopt, __FILE__, __LINE__) {
  std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  if (info.needs_contiguous) {
    tags.push_back(at::Tag::needs_contiguous_strides);
  }
  if (info.is_random) {
    tags.push_back(at::Tag::nondeterministic_seeded);
  }
  library_.def(info.schema, std::as_const(tags));
}

void Operator::set_kernel(c10::DispatchKey key, torch::CppFunction kernel) {
  library_.impl(name_.c_str(), torch::dispatch(key, std::move(kernel)));
}

void Operator::serve_core(StackFunction run) const { all_core_kernels().push_back({name_, std::move(run)}); }

const std::vector<CoreKernel>& core_kernels() { return all_core_kernels(); }

void return_results(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                    std::vector<at::Tensor> results) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  if (op.schema().returns()[0].type()->kind() == c10::TypeKind::TensorType) {
    stack->emplace_back(std::move(results[0]));
  } else {
    stack->emplace_back(std::move(results));
  }
}

torch::CppFunction boxed(StackFunction run) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedRun>(std::move(run)));
}

}  // namespace funcol
