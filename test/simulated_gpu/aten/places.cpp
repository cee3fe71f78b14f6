#include "places.h"

#include <cxxabi.h>
#include <torch/csrc/autograd/function.h>

#include <cstdlib>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "python_frames.h"

namespace simulated_gpu::aten {
namespace {

thread_local std::shared_ptr<const IssuePlace> known_place;
thread_local int num_at_one_place = 0;
thread_local int num_without_places = 0;

// A node's class, since asking it for its name may run Python.
const std::type_info* running_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return nullptr;
  }
  const torch::autograd::Node& running = *node;
  return &typeid(running);
}

std::string demangled(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : type.name();
}

class FoundPlace final : public IssuePlace {
 public:
  FoundPlace(std::vector<const std::string*> frames, const std::type_info* node)
      : frames_(std::move(frames)), node_(node) {}

  std::string text() const override {
    std::string text;
    for (const std::string* frame : frames_) {
      text += "  " + *frame + "\n";
    }
    if (node_ != nullptr) {
      text += "  in the backward pass of " + demangled(*node_) + "\n";
    }
    if (!text.empty()) {
      text.pop_back();
    }
    return text;
  }

 private:
  std::vector<const std::string*> frames_;
  const std::type_info* node_;
};

}  // namespace

std::shared_ptr<const IssuePlace> find_issue_place() {
  if (num_at_one_place > 0) {
    return known_place;
  }
  if (num_without_places > 0 || !options().races) {
    return nullptr;
  }
  auto frames = python_frames();
  const std::type_info* const node = running_node();
  if (frames.empty() && node == nullptr) {
    return nullptr;
  }
  return std::make_shared<FoundPlace>(std::move(frames), node);
}

AtOnePlace::AtOnePlace() : is_outermost_(num_at_one_place == 0) {
  if (is_outermost_) {
    known_place = find_issue_place();
  }
  ++num_at_one_place;
}

AtOnePlace::~AtOnePlace() {
  --num_at_one_place;
  if (is_outermost_) {
    known_place = nullptr;
  }
}

WithoutPlaces::WithoutPlaces() { ++num_without_places; }

WithoutPlaces::~WithoutPlaces() { --num_without_places; }

}  // namespace simulated_gpu::aten
