#include "comm/collective_info.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <typeinfo>
#include <utility>

namespace funcol {

InFlight::InFlight(std::string_view op, GroupRef group, at::TensorList outputs, CallSite started)
    : op(op), group(std::move(group)), started(std::move(started)) {
  shapes.reserve(outputs.size());
  for (const auto& output : outputs) {
    if (!output.defined()) {
      continue;
    }
    shapes.push_back(output.sizes().vec());
    is_on_cpu &= output.is_cpu();
    if (!dtype.has_value()) {
      dtype = output.scalar_type();
    }
  }
}

std::string own_rank_text(const GroupRef& ref) {
  const auto group = ref.lock();
  if (!group || typeid(*group) != typeid(c10d::ProcessGroup)) {
    return {};
  }
  try {
    return c10::str(" (rank ", group->getRank(), " of ", group->getSize(), ")");
  } catch (const c10::Error&) {  // its backend is gone
    return {};
  }
}

std::string InFlight::text() const {
  std::ostringstream text;
  text << op << " of " << (dtype.has_value() ? c10::toString(*dtype) : "no tensors");
  for (size_t i = 0; i < shapes.size(); ++i) {
    text << (i == 0 ? " " : ", ") << at::IntArrayRef(shapes[i]);
  }
  text << " on group '" << group.name() << "'" << own_rank_text(group) << " for " << std::fixed
       << std::setprecision(1) << started.seconds() << " s";
  if (started.caller != nullptr) {
    text << ", started at " << *started.caller;
  }
  if (started.purpose != nullptr) {
    text << ", for " << *started.purpose;
  }
  return text.str();
}

}  // namespace funcol
