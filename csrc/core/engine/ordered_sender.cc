#include "core/engine/ordered_sender.h"

#include <utility>

namespace poseidon {

OrderedSender::OrderedSender(Engine* engine, double credit_bytes, std::vector<Item> order)
    : engine_(engine), credit_bytes_(credit_bytes) {
  for (Item& item : order) entries_.push_back({std::move(item)});
}

void OrderedSender::Attach() {
  for (size_t position = 0; position < entries_.size(); ++position) {
    entries_[position].item.exchange->set_on_end([self = weak_from_this(), position](bool ok) {
      if (const auto sender = self.lock()) sender->OnEnd(position, ok);
    });
  }
}

void OrderedSender::Ready(size_t position) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_[position].ready = true;
  }
  Start();
}

void OrderedSender::Start() {
  while (true) {
    std::shared_ptr<Exchange> next;
    bool failed = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failed = failed_;
      if (failed) {  // whatever is ready, in any order
        for (Entry& entry : entries_) {
          if (std::exchange(entry.ready, false)) next = entry.item.exchange;
          if (next) break;
        }
        if (!next) return;
      } else {
        if (next_ == entries_.size() || !entries_[next_].ready) return;
        const double bytes = entries_[next_].item.bytes;
        if (in_flight_ > 0 && in_flight_ + bytes > credit_bytes_) return;
        entries_[next_].ready = false;
        in_flight_ += bytes;
        next = entries_[next_++].item.exchange;
      }
    }
    if (failed) {
      engine_->Fail(next, Status::Aborted("not sent, because what was to be sent before it failed"));
      continue;
    }
    engine_->Start(next);
  }
}

void OrderedSender::OnEnd(size_t position, bool ok) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ok) {
      if (std::exchange(failed_, true)) return;  // whoever found the first failure ends the others
    } else {
      in_flight_ -= entries_[position].item.bytes;
    }
  }
  Start();
}

void OrderedSender::Reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Entry& entry : entries_) entry.ready = false;
  next_ = 0;
  in_flight_ = 0;
  failed_ = false;
}

}  // namespace poseidon
