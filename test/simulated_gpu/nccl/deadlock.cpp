#include "nccl/deadlock.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/leftovers.h"
#include "nccl/mailbox.h"

namespace simulated_gpu::nccl {
namespace {

// One rank of a communicator, as the name of the file of its note.
std::string node_of(const std::string& communicator, int rank) {
  return "/dev/shm/" + std::string(kFilePrefix) + communicator + "-stall" + std::to_string(rank);
}
std::string node_of(const Communicator& communicator) {
  return node_of(communicator.key(), communicator.rank());
}

// An arrow to a node that has to go on first. Behind a call of the own rank there is no letter.
struct Arrow {
  std::string to;
  std::string letter = {};
  bool is_own_letter = false;

  // Returns false once the letter has come, or been read: the rank of the note has not looked since.
  bool holds() const { return letter.empty() || is_unread(letter) == is_own_letter; }
};

struct Note {
  std::string stamp;  // another one for each note
  std::string text;   // a line
  std::vector<Arrow> arrows;

  std::string content() const {
    std::string content = text;
    for (const Arrow& arrow : arrows) {
      content += "\n" + arrow.to + " " + (arrow.is_own_letter ? "own" : "awaited") + " " + arrow.letter;
    }
    return content;
  }
};

std::optional<Note> read_note(const std::string& node) {
  std::ifstream file(node);
  Note note;
  if (!std::getline(file, note.stamp) || !std::getline(file, note.text)) return std::nullopt;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    Arrow arrow;
    std::string whose;
    words >> arrow.to >> whose >> arrow.letter;
    arrow.is_own_letter = whose == "own";
    note.arrows.push_back(std::move(arrow));
  }
  return note;
}

std::string described(const Communicator& communicator) {
  return "rank " + std::to_string(communicator.rank()) + " of communicator " + communicator.key();
}

// The notes of this process, and the circles that they are in. Of the scheduler's thread.
class Stall {
 public:
  // Never destroyed: the scheduler's thread runs until the process ends.
  static Stall& instance() {
    static auto* const stall = new Stall();
    return *stall;
  }

  void end() {
    for (const auto& [node, content] : written_) unlink(node.c_str());
    written_.clear();
  }

  void look(const std::vector<Stalled>& stalls) {
    std::map<std::string, Note> notes;
    const auto communicators = all_communicators();
    for (const CommunicatorPtr& communicator : communicators) {
      if (auto note = note_of(*communicator, stalls)) notes[node_of(*communicator)] = std::move(*note);
    }
    write(notes);
    for (const auto& [node, note] : notes) {
      const auto circle = circle_through(node);
      if (!circle.empty() && is_true(circle)) {
        fail(circle, communicators, stalls);
        return;
      }
    }
  }

 private:
  using Circle = std::vector<std::pair<std::string, Note>>;

  static const Stalled* find(const std::vector<Stalled>& stalls, const Communicator& communicator) {
    const auto at =
        std::ranges::find_if(stalls, [&](const Stalled& one) { return one.chain == &communicator; });
    return at == stalls.end() ? nullptr : &*at;
  }

  static std::optional<Note> note_of(const Communicator& communicator, const std::vector<Stalled>& stalls) {
    Note note;
    if (communicator.running().waits) {
      note.text = described(communicator) + " runs " + communicator.running().name + " and waits for";
      for (const Wait& wait : communicator.running().waits()) {
        note.text += (note.arrows.empty() ? " rank " : ", ") + std::to_string(wait.rank);
        note.arrows.push_back({node_of(communicator.key(), wait.rank), wait.letter, wait.is_own});
      }
    } else if (const Stalled* const stalled = find(stalls, communicator)) {
      note.text = described(communicator) + " has " + stalled->name + " queued behind";
      for (const void* const chain : stalled->behind) {
        const auto other = nccl::find(static_cast<ncclComm_t>(const_cast<void*>(chain)));
        if (!other) continue;
        note.text += (note.arrows.empty() ? " communicator " : ", ") + other->key();
        note.arrows.push_back({node_of(*other)});
      }
    }
    return note.arrows.empty() ? std::nullopt : std::optional(std::move(note));
  }

  // Notes that say the same keep their stamps.
  void write(const std::map<std::string, Note>& notes) {
    std::erase_if(written_, [&](const auto& one) {
      const bool is_gone = !notes.contains(one.first);
      if (is_gone) unlink(one.first.c_str());
      return is_gone;
    });
    for (const auto& [node, note] : notes) {
      const std::string content = note.content();
      if (written_[node] == content) continue;
      written_[node] = content;
      const std::string draft = node + ".new";
      std::ofstream(draft) << getpid() << "." << num_stamps_++ << "\n" << content << "\n";
      std::rename(draft.c_str(), node.c_str());
    }
  }

  // Follows arrows from `begin`, depth first. Empty if none leads back.
  static Circle circle_through(const std::string& begin) {
    std::map<std::string, bool> seen;
    Circle path;
    const auto follow = [&](const auto& self, const std::string& node) -> bool {
      if (std::exchange(seen[node], true)) return false;
      auto note = read_note(node);
      if (!note) return false;
      path.emplace_back(node, *note);
      for (Arrow& arrow : note->arrows) {
        path.back().second.arrows = {arrow};
        if (arrow.holds() && (arrow.to == begin || self(self, arrow.to))) return true;
      }
      path.pop_back();
      return false;
    };
    follow(follow, begin);
    return path;
  }

  // The letters of the arrows were looked at after the notes were read.
  static bool is_true(const Circle& circle) {
    const auto holds = [](const auto& step) { return step.second.arrows[0].holds(); };
    return std::ranges::all_of(circle, holds) && std::ranges::all_of(circle, [](const auto& step) {
             const auto now = read_note(step.first);
             return now && now->stamp == step.second.stamp;
           });
  }

  static void fail(const Circle& circle, const std::vector<CommunicatorPtr>& communicators,
                   const std::vector<Stalled>& stalls) {
    std::string why = "nothing can run: communicators wait for each other";
    for (const auto& [node, note] : circle) why += "\n  " + note.text;
    why += "\n  Ranks call on these communicators in different orders: use one order on all ranks.";
    std::string text = why;
    std::vector<CommunicatorPtr> failing;
    for (const CommunicatorPtr& communicator : communicators) {
      const auto is_own = [&](const auto& step) { return step.first == node_of(*communicator); };
      if (std::ranges::none_of(circle, is_own)) continue;
      failing.push_back(communicator);
      const Stalled* const stalled = find(stalls, *communicator);
      if (stalled != nullptr && stalled->place) {
        text += "\n  " + stalled->name + " is issued at\n" + stalled->place->text();
      }
    }
    report("nccl: " + text);
    for (const CommunicatorPtr& communicator : failing) communicator->fail(ncclInvalidUsage, why);
  }

  std::map<std::string, std::string> written_;  // contents, by node
  uint64_t num_stamps_ = 0;
};

}  // namespace

void on_stall(const std::vector<Stalled>* stalls) {
  if (stalls == nullptr) {
    Stall::instance().end();
  } else {
    Stall::instance().look(*stalls);
  }
}

}  // namespace simulated_gpu::nccl
