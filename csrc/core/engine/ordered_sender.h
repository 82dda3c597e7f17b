// Starts exchanges in an order that all ranks have agreed on, with a bounded number of bytes in flight (ByteScheduler's
// credit), so that what comes to be ready later may still overtake what waits. The order is fixed, since with bounded
// credit ranks that chose differently would wait for each other for ever.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/engine/engine.h"

namespace poseidon {

// Any thread.
class OrderedSender : public std::enable_shared_from_this<OrderedSender> {
 public:
  struct Item {
    std::shared_ptr<Exchange> exchange;
    double bytes = 0;
  };

  // One exchange may always be in flight, whatever its size. The engine must outlive all exchanges.
  OrderedSender(Engine* engine, double credit_bytes, std::vector<Item> order);
  // To be called once before use, after make_shared: the exchanges report their end here. They may be used by one
  // sender only.
  void Attach();

  // The exchange at `position`, admitted to the engine, may start when all before it have. If it then fails, it ends
  // so, and all behind it.
  void Ready(size_t position);
  // A new step: all exchanges have ended.
  void Reset();

 private:
  struct Entry {
    Item item;
    bool ready = false;
  };

  void Start();
  void OnEnd(size_t position, bool ok);

  Engine* const engine_;
  const double credit_bytes_;

  std::mutex mutex_;  // not held while the engine is called
  std::vector<Entry> entries_;
  size_t next_ = 0;
  double in_flight_ = 0;
  bool failed_ = false;
};

}  // namespace poseidon
