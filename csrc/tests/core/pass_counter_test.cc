#include "core/base/pass_counter.h"

#include "tests/check.h"

namespace poseidon {
namespace {

using Event = PassCounter::Event;

TEST(OnePassPerStep) {
  PassCounter counter(1);
  POSEIDON_CHECK(!counter.ready() && !counter.sent() && !counter.touched());
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kReady);
  POSEIDON_CHECK(counter.ready() && counter.touched() && !counter.sent());
  counter.MarkSent();
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kTooMany);
  counter.Reset();
  POSEIDON_CHECK(!counter.ready() && !counter.sent() && !counter.touched());
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kReady);
}

TEST(SeveralPassesPerStep) {
  PassCounter counter(3);
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kCounted);
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kCounted);
  POSEIDON_CHECK_EQ(counter.remaining(), 1);
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kReady);
  // Horovod asserts here whether or not the gradient has been sent.
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kTooMany);
  POSEIDON_CHECK_EQ(counter.remaining(), 0);
}

TEST(EarlySend) {
  PassCounter counter(2);
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kCounted);
  counter.MarkSent();  // by the layer's backward node of the second pass
  POSEIDON_CHECK(counter.sent() && !counter.ready());
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kCounted);  // the hook of the same pass: not a second send
  POSEIDON_CHECK(counter.ready());
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kTooMany);
}

TEST(SentBySynchronizeWithPassesMissing) {
  PassCounter counter(3);
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kCounted);
  counter.MarkSent();
  counter.Reset();
  POSEIDON_CHECK_EQ(counter.remaining(), 3);
  PassCounter unused(1);
  unused.MarkSent();
  POSEIDON_CHECK(unused.sent() && !unused.touched());
}

TEST(ChangedPassesCountAnew) {
  PassCounter counter(1);
  counter.SetPassesPerStep(2);
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kCounted);
  counter.SetPassesPerStep(2);
  POSEIDON_CHECK_EQ(counter.remaining(), 2);
  POSEIDON_CHECK(counter.touched());
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kCounted);
  POSEIDON_CHECK_EQ(counter.OnPass(), Event::kReady);
  counter.Reset();
  POSEIDON_CHECK_EQ(counter.remaining(), 2);
}

}  // namespace
}  // namespace poseidon
