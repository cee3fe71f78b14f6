#include "async/in_flight.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "async/pending_collective.h"
#include "comm/orphaned_works.h"
#include "support/fake_work.h"

namespace funcol::in_flight_test {
namespace {

using test::completed_work;
using test::FakeWork;
using PendingPtr = c10::intrusive_ptr<PendingCollective>;

// A Work that says what it does, as those of backends do: it is queried whether it is over.
class NamedWork final : public c10d::Work {
 public:
  NamedWork() : Work(-1, c10d::OpType::ALLREDUCE) {}
  bool isCompleted() override { return is_over; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }

  bool is_over = false;
};

PendingPtr started(const char* op, c10::intrusive_ptr<c10d::Work> work, bool is_counted = true) {
  StartedCollective start;
  start.op = op;
  start.group = GroupRef("dp");
  start.work = std::move(work);
  start.outputs = {at::zeros({2, 3}), at::zeros({4})};
  start.is_counted = is_counted;
  return c10::make_intrusive<PendingCollective>(std::move(start));
}

std::vector<InFlight> in_flight(const std::string& op, QueriedWorks queried = QueriedWorks::kAll) {
  auto found = collectives_in_flight(queried);
  std::erase_if(found, [&](const auto& one) { return one.op != op; });
  return found;
}

TEST(CollectivesInFlight, HaveOpGroupShapesAndDtype) {
  const auto collective = started("listed", c10::make_intrusive<NamedWork>());
  const auto found = in_flight("listed");
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].group.name(), "dp");
  EXPECT_EQ(found[0].shapes, (std::vector<std::vector<int64_t>>{{2, 3}, {4}}));
  EXPECT_EQ(found[0].dtype, at::kFloat);
  EXPECT_EQ(found[0].text().find("listed of Float [2, 3], [4] on group 'dp' for 0."), 0);
}

TEST(CollectivesInFlight, AreThoseThatAreWaitedForAtOnce) {
  const auto collective = started("uncounted", c10::make_intrusive<NamedWork>(), /*is_counted=*/false);
  EXPECT_EQ(in_flight("uncounted").size(), 1);
  EXPECT_EQ(unwaited_collectives().count("uncounted"), 0);
}

TEST(CollectivesInFlight, EndWhenTheirWorkSaysThatItIsOver) {
  const auto work = c10::make_intrusive<NamedWork>();
  const auto collective = started("over", work);
  for (const auto queried : {QueriedWorks::kAll, QueriedWorks::kOnCpu}) {
    work->is_over = false;
    EXPECT_EQ(in_flight("over", queried).size(), 1);
    work->is_over = true;
    EXPECT_EQ(in_flight("over", queried).size(), 0);
  }
}

TEST(CollectivesInFlight, OfWorksThatMayBeWrittenInPythonEndWhenTheyAreWaitedFor) {
  const auto work = completed_work();
  const auto collective = started("not queried", work);
  EXPECT_EQ(in_flight("not queried").size(), 1);
  EXPECT_EQ(work->num_asked, 0);
  collective->settle();
  EXPECT_EQ(in_flight("not queried").size(), 0);
}

TEST(CollectivesInFlight, AreListedThoughTheirResultWasDropped) {
  const auto work = c10::make_intrusive<NamedWork>();
  started("dropped", work).reset();
  ASSERT_EQ(in_flight("dropped").size(), 1);
  EXPECT_EQ(in_flight("dropped")[0].shapes[0], (std::vector<int64_t>{2, 3}));
  work->is_over = true;
  EXPECT_EQ(in_flight("dropped").size(), 0);
}

TEST(CollectivesInFlight, ThatAreRegisteredAreListedUntilTheirWorkGoes) {
  auto work = c10::make_intrusive<NamedWork>();
  note_registered("registered", GroupRef("tp"), {at::zeros({5})}, work);
  EXPECT_EQ(in_flight("registered").size(), 1);
  work.reset();
  EXPECT_EQ(in_flight("registered").size(), 0);
}

TEST(CollectivesInFlight, ThatAreRegisteredAndGoneTakeNoMemory) {
  const auto running = c10::make_intrusive<NamedWork>();
  note_registered("kept", GroupRef("tp"), {}, running);
  for (int i = 0; i < 1000; ++i) {
    note_registered("gone", GroupRef("tp"), {}, c10::make_intrusive<NamedWork>());
  }
  EXPECT_EQ(in_flight("kept").size(), 1);
  EXPECT_EQ(in_flight("gone").size(), 0);
}

// Returns the error message of a registered collective whose Work fails by `raise`, waited for by a view of
// the result.
template <typename Error>
std::string message_of_registered(const std::function<void()>& raise) {
  const auto output = at::zeros({2, 3});
  const auto work = c10::make_intrusive<FakeWork>(raise);
  note_registered("all_gather", GroupRef("tp"), {output}, work);
  c10d::register_work(output, work);
  try {
    wait_on_registry(output.view(-1));
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

constexpr auto kNamed =
    "funcol::all_gather failed on group 'tp'; result of shape [2, 3] has no data.\nIt was";

TEST(CollectivesInFlight, ThatAreRegisteredAreNamedByTheErrorsOfBackends) {
  const auto message =
      message_of_registered<c10::DistBackendError>([] { throw std::runtime_error("peer is gone"); });
  EXPECT_EQ(message.find("peer is gone\n"), 0) << message;
  EXPECT_NE(message.find(kNamed), std::string::npos) << message;
}

TEST(CollectivesInFlight, ThatAreRegisteredAreNamedByErrorsThatKeepTheirType) {
  const auto message = message_of_registered<c10::ValueError>([] { TORCH_CHECK_VALUE(false, "timed out"); });
  EXPECT_NE(message.find("timed out"), std::string::npos) << message;
  EXPECT_NE(message.find(kNamed), std::string::npos) << message;
}

TEST(CollectivesInFlight, ThatNobodyNotedFailAsTheyDoInPyTorch) {
  const auto output = at::zeros({2});
  c10d::register_work(output,
                      c10::make_intrusive<FakeWork>([] { throw std::runtime_error("peer is gone"); }));
  try {
    wait_on_registry(output);
    ADD_FAILURE() << "nothing was raised";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "peer is gone");
  }
}

// Returns the error message of a collective that fails while another one is in flight.
std::string message_beside_another() {
  const auto own = started("own", c10::make_intrusive<FakeWork>([] { throw std::runtime_error("gone"); }));
  const auto other = started("other", c10::make_intrusive<NamedWork>());
  try {
    own->settle();
  } catch (const c10::DistBackendError& error) {
    return error.what();
  }
  return "no error";
}

// In a child process, where no collective of another test is in flight.
TEST(CollectivesInFlight, OthersAreToldOfButNotTheOneThatFailed) {
  EXPECT_EXIT(
      {
        const auto message = message_beside_another();
        std::cerr << message;
        _exit(message.find("\n  own of") == std::string::npos ? 0 : 1);
      },
      testing::ExitedWithCode(0),
      "It was started 0.(.|\n)*\nAlso in flight in this process:\n  other of Float \\[2, 3\\]");
}

TEST(CollectivesInFlight, OfARankInAGroupSayWhichItIs) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(1, 2);
  const InFlight what("all_reduce", GroupRef(group), {}, CallSite::now());
  EXPECT_NE(what.text().find("all_reduce of no tensors on group '(unnamed)' (rank 1 of 2) for"),
            std::string::npos)
      << what.text();
}

}  // namespace
}  // namespace funcol::in_flight_test
