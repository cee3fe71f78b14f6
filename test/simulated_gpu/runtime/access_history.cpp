#include "access_history.h"

#include <algorithm>
#include <sstream>

namespace simulated_gpu {
namespace {

uintptr_t begin_of(const Range& range) { return reinterpret_cast<uintptr_t>(range.begin); }
uintptr_t end_of(const Range& range) { return begin_of(range) + range.size; }

}  // namespace

std::string Issued::text() const {
  std::ostringstream out;
  out << name << " (operation " << number << " of stream " << line << ")";
  if (place) {
    out << ", issued at\n" << place->text();
  }
  return out.str();
}

std::string Conflict::text() const {
  std::ostringstream out;
  out << "race: nothing orders these two operations on " << bytes.size << " bytes at " << bytes.begin << "\n"
      << (later_writes ? "  a write" : "  a read") << " by " << later->text() << "\n"
      << (earlier_writes ? "  a write" : "  a read") << " by " << earlier->text();
  if (later->kind == Kind::kPoison) {
    out << "\n  The memory was freed and handed out again while the earlier operation may still run: "
        << "record_stream() or a wait is missing.";
  }
  return out.str();
}

void AccessHistory::split(uintptr_t address) {
  auto at = segments_.upper_bound(address);
  if (at == segments_.begin()) {
    return;
  }
  --at;
  if (at->first == address || at->second.end <= address) {
    return;
  }
  Segment rest = at->second;
  at->second.end = address;
  segments_.emplace(address, std::move(rest));
}

std::optional<Conflict> AccessHistory::add(const Range& range, bool writes, const IssuedPointer& by,
                                           const IsOrdered& is_ordered) {
  if (range.size == 0) {
    return std::nullopt;
  }
  std::optional<Conflict> found;
  const auto check = [&](const IssuedPointer& earlier, bool earlier_writes, uintptr_t begin, uintptr_t end) {
    if (!found && earlier && earlier != by && !is_ordered(*earlier)) {
      found = Conflict{earlier, by, earlier_writes, writes,
                       Range{reinterpret_cast<const void*>(begin),  // NOLINT(performance-no-int-to-ptr)
                             end - begin}};
    }
  };
  split(begin_of(range));
  split(end_of(range));
  auto at = segments_.lower_bound(begin_of(range));
  if (writes) {
    const auto end = segments_.lower_bound(end_of(range));
    for (; at != end; ++at) {
      check(at->second.written, true, at->first, at->second.end);
      for (const IssuedPointer& reader : at->second.read) {
        check(reader, false, at->first, at->second.end);
      }
    }
    forget(range);
    segments_.emplace(begin_of(range), Segment{end_of(range), by, {}});
    return found;
  }
  uintptr_t covered = begin_of(range);
  while (covered < end_of(range)) {
    if (at == segments_.end() || at->first > covered) {  // bytes that are not used yet
      const uintptr_t end = at == segments_.end() ? end_of(range) : std::min(at->first, end_of(range));
      at = segments_.emplace_hint(at, covered, Segment{end, nullptr, {}});
    }
    check(at->second.written, true, at->first, at->second.end);
    at->second.add_reader(by);
    covered = at->second.end;
    ++at;
  }
  return found;
}

void AccessHistory::Segment::add_reader(const IssuedPointer& reader) {
  const auto same =
      std::ranges::find_if(read, [&](const IssuedPointer& other) { return other->line == reader->line; });
  if (same == read.end()) {
    read.push_back(reader);
  } else {
    *same = reader;
  }
}

void AccessHistory::forget(const Range& range) {
  split(begin_of(range));
  split(end_of(range));
  segments_.erase(segments_.lower_bound(begin_of(range)), segments_.lower_bound(end_of(range)));
}

}  // namespace simulated_gpu
