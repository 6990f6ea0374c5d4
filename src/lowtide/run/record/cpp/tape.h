// The tape of one step: values, the operations that wrote them (nodes), and which value a storage shows.
//
// A value is one version of one storage. Where an operation of the tape wrote it, it has a node; else it is a
// source: the program made it, and the tape refers to it weakly, with its version. A source of few bytes
// (`FEW_BYTES`) is held from the first. Autograd's handles hold values, a value its node, a node the values
// that it reads. So what nobody can ask for is freed.
//
// `evict` gives up a value's copy. From then on the nodes that bring the value back are pinned: they count
// among the readers of what they read, and the sources are held. All of it runs under the interpreter's lock,
// but for `Ledger::missing_bytes`, which is atomic (`Governor::widen` reads it without), and `Reach`.
#pragma once

#include <algorithm>
#include <thread>
#include <unordered_map>

#include "python.h"
#include "reach.h"
#include "settings.h"
#include "share.h"

namespace lowtide {

struct Node;
struct Value;
struct Handles;
using NodePtr = c10::intrusive_ptr<Node>;
using ValuePtr = c10::intrusive_ptr<Value>;
using WeakValue = c10::weak_intrusive_ptr<Value>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

void bury(NodePtr node);  // frees a chain of nodes without recursion

inline WeakStorage weak_storage(const Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

struct Functions {  // of Python, for what is rare
  py::object here;         // a value that was emptied and filled again, or whose stream is another
  py::object fingerprint;  // of a tensor's first bytes
  py::object overwritten;  // raises autograd's error
  py::object unpack;       // what Python packed
  py::object facts;        // of an operation
  py::object where;        // user code is: a module and a line
  py::object current;      // the recorder that Python has for this thread, or None
};
inline Functions* functions = nullptr;  // set once per process

enum class Plan : uint8_t { None, Stored, Evicted, EvictedFirst };  // of a value

struct Ledger : c10::intrusive_ptr_target {  // of one step
  std::atomic<int64_t> missing_bytes{0};  // evicted, and to come back: a plain step would hold them
  bool single_rank = true;  // no other rank has to run the same collectives, unless a plan says so
};

struct Value : c10::intrusive_ptr_target {
  NodePtr node;
  int64_t nbytes = 0, extent = 0;
  WeakStorage storage;          // of the program, which shows the value
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t version = 0;
  KnownPtr known;               // of a source: to threads that lowtide has not met
  Tensor held;                  // a source that replays start from
  Tensor cached;                // a copy, while somebody reads it: most often the program's own storage
  Tensor shown;                 // what the program wrote over it, past the version counter
  Handles* handles = nullptr;   // of autograd, while there are any
  Tensor emptied;               // a fingerprint of a source whose storage was emptied
  std::optional<c10::Stream> stream;
  int64_t digest = 0;
  long readers = 0;             // handles, and pinned nodes
  long saved = 0;               // handles that nobody has asked yet
  int64_t unit = 0;             // of FSDP, in which it was made or first read
  int32_t run = 0;              // of that unit
  at::ScalarType dtype = at::kByte;  // of a source
  Plan plan = Plan::None;
  bool has_digest = false, made_here = false, gathered = false, spoiled = false, listed = false,
       crosses = false,      // another run of a unit needs it, perhaps without the weights of its own
       overwritten = false;  // the program has written over its bytes: a plain step holds them no longer

  Value() : storage(c10::intrusive_ptr<c10::StorageImpl>()) {}
  ~Value() override { clear(); }
  void release_resources() override { clear(); }

  bool is_source() const { return !node; }
  bool is_copy() const { return !node && !known; }  // of a source that was overwritten
  bool has_copy() const {  // and the program has not emptied its storage
    return cached.defined() && cached.storage().nbytes() >= static_cast<size_t>(nbytes);
  }

  void add_reader() { ++readers; }
  void count_off() {
    if (readers > 0 && --readers == 0) {
      came_back();
      cached.reset();
      if (nbytes > FEW_BYTES) let_go();
      emptied.reset();
    }
  }

  void let_go() {  // of a source
    held.reset();
    if (known) known->is_needed = false;
  }

  // A source of so few bytes is held by who reads it from the first: it costs less than what starts from it.
  static constexpr int64_t FEW_BYTES = 4096;

  void went(const c10::intrusive_ptr<Ledger>& book) {  // it is evicted now
    if (ledger || overwritten) return;
    ledger = book;
    ledger->missing_bytes += nbytes;
  }
  void is_overwritten() {
    overwritten = true;
    came_back();
  }
  void came_back() {
    if (auto book = std::move(ledger)) book->missing_bytes -= nbytes;
  }

 private:
  c10::intrusive_ptr<Ledger> ledger;  // while it is evicted

  void clear() {
    came_back();
    cached.reset();
    let_go();
    known.reset();  // which refers to this
    shown.reset();
    emptied.reset();
    if (node) bury(std::move(node));
  }
};

struct Node : c10::intrusive_ptr_target {
  double order = 0, seconds = 0;
  bool waits = false, exact = true, grad = true, collective = false;
  bool moved = false;  // it fetches, for each who asks: a retained graph keeps no copy on the device
  c10::SmallVector<ValuePtr, 4> inputs;
  std::shared_ptr<const Settings> settings = Settings::now();  // it runs again under the same
  std::optional<RecordedCall> call;
  py::object special;  // else: an object of Python with a method `run(bases, sole_reader)`
  c10::SmallVector<std::pair<uint32_t, WeakValue>, 2> outputs;  // with the places among the results
  c10::SmallVector<std::pair<uint32_t, WeakValue>, 1> updated;  // what the call overwrites, by its input

  ~Node() override {
    count_off();
    if (special) {
      py::gil_scoped_acquire gil;
      special = py::object();
    }
  }

  void count_off() {  // it has run again, or never will
    if (!std::exchange(waits, false)) return;
    for (auto& input : inputs) input->count_off();
  }
};

inline void bury(NodePtr node) {
  thread_local std::vector<NodePtr>* open = nullptr;
  if (open != nullptr) {
    open->push_back(std::move(node));
    return;
  }
  std::vector<NodePtr> nodes;
  open = &nodes;
  nodes.push_back(std::move(node));
  while (!nodes.empty()) {
    NodePtr next = std::move(nodes.back());
    nodes.pop_back();
    next.reset();
  }
  open = nullptr;
}

// ---- where a value's bytes are --------------------------------------------------------------------

inline Tensor bytes_of(const c10::intrusive_ptr<c10::StorageImpl>& storage) {
  c10::InferenceMode tracked(false);
  auto options = at::TensorOptions().device(storage->device()).dtype(at::kByte);
  return at::empty({0}, options).set_(c10::Storage(storage));
}

inline bool share_bytes(const Tensor& one, const Tensor& other) {
  return address_of(one) == address_of(other);
}

inline void keep_cached(Value& value, Tensor copy) {
  if (has_streams(copy)) value.stream = stream_of(copy);
  value.cached = std::move(copy);
}

struct Handles : c10::intrusive_ptr_target {  // what autograd's handles of a value have in common
  ValuePtr value;

  explicit Handles(ValuePtr of) : value(std::move(of)) { value->handles = this; }
  ~Handles() override {
    value->handles = nullptr;
    value->shown.reset();  // its storage has an entry, and that the value
  }

  static c10::intrusive_ptr<Handles> of(const ValuePtr& value) {
    if (value->handles == nullptr) return c10::make_intrusive<Handles>(value);
    return c10::intrusive_ptr<Handles>::reclaim_copy(value->handles);
  }

  // An operation of the tape has overwritten a value whose handles show what was written: they are the new
  // value's from now on, which comes back by itself.
  static void pass_on(Value& old, const ValuePtr& value) {
    keep_cached(*value, std::move(old.shown));
    value->crosses = old.crosses || old.run != value->run;
    value->handles = std::exchange(old.handles, nullptr);
    for (; old.saved > 0; --old.saved, ++value->saved) {
      value->add_reader();
      old.count_off();
    }
    value->handles->value = value;
  }
};

inline uint32_t version_now(const Value& source) {  // inference tensors count none
  return source.counter.enabled() ? source.counter.current_version() : 0;
}

inline bool is_unchanged(const Value& source) {
  if (source.spoiled || (source.known && source.known->state == Known::Written)) return false;
  return version_now(source) == source.version;
}

// A tensor over a living source; undefined once it is gone, or was written since.
inline Tensor locked(const Value& source, c10::Device device, at::ScalarType dtype) {
  auto storage = source.storage.lock();
  if (!storage || !is_unchanged(source)) return {};
  c10::InferenceMode outside(false);  // a tensor that inference mode makes takes no version counter
  auto options = at::TensorOptions().device(device).dtype(dtype);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  int64_t elements = static_cast<int64_t>(storage->nbytes() / c10::elementSize(dtype));
  made.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
  if (source.counter.enabled()) made.unsafeGetTensorImpl()->set_version_counter(source.counter);
  return made;
}

inline Tensor locked(const Value& source) {
  auto storage = source.storage.lock();
  return storage ? locked(source, storage->device(), source.dtype) : Tensor();
}

// A tensor on a value's bytes; undefined where it has to be replayed. Python raises where it cannot be.
inline Tensor here(const ValuePtr& value) {
  Value& v = *value;
  if (v.held.defined()) {
    bool whole = v.held.storage().nbytes() >= static_cast<size_t>(v.nbytes);
    bool ready = whole && !v.emptied.defined() && v.held._version() == v.version;
    if (ready && (!has_streams(v.held) || !v.stream || *v.stream == stream_of(v.held))) return v.held;
    return functions->here(py::cast(value)).cast<Tensor>();
  }
  if (!v.has_copy()) return {};
  if (has_streams(v.cached) && v.stream && *v.stream != stream_of(v.cached))
    return functions->here(py::cast(value)).cast<Tensor>();
  return v.cached;
}

// ---- what it takes to bring a value back -----------------------------------------------------------

struct Closure {
  double seconds = 0;
  int64_t pins_bytes = 0;     // sources that nothing else has held so far
  int64_t missing_bytes = 0;  // of values that come back on the way
  long nodes = 0;
  bool possible = true;
};

class Walk {  // through the nodes that a replay of a value would run
 public:
  template <class OnNode, class OnSource>
  void operator()(Value& value, OnNode on_node, OnSource on_source) {
    seen_.clear();
    wanted_.assign(1, &value);
    bool first = true;
    while (!wanted_.empty()) {
      Value* next = wanted_.back();
      wanted_.pop_back();
      if (!next->node) {
        if (!on_source(*next)) return;
        continue;
      }
      if (!first && next->has_copy()) continue;
      first = false;
      Node* node = next->node.get();
      if (!seen_.insert(node).second) continue;
      if (!on_node(*node)) return;
      for (auto& input : node->inputs) wanted_.push_back(input.get());
    }
  }

 private:
  ska::flat_hash_set<Node*> seen_;
  std::vector<Value*> wanted_;
};

inline bool can_start_from(const Value& source) {
  if (source.spoiled) return false;  // the write may be about to run: no counter has moved yet
  if (source.held.defined()) return source.held._version() == source.version;
  return !source.storage.expired() && is_unchanged(source);
}

enum class Change { Written, Swapped, Emptied };  // of a storage, or of a tensor's storage for another

class Tape {
  struct Shown {  // by a storage
    ValuePtr value;
    WeakStorage storage;
    KnownPtr known;
  };
  using ByStorage = ska::flat_hash_map<uintptr_t, Shown>;

 public:
  explicit Tape(bool verify) : verify(verify) {}

  const bool verify;
  double order = 0;
  int64_t unit = 0;  // of FSDP that runs now, and the number of its run
  int32_t run = 0;
  bool natural = false;  // somebody watches how long the program's own storages live
  std::thread::id recorded_on;  // the thread whose forward is recorded now
  c10::intrusive_ptr<Ledger> ledger = c10::make_intrusive<Ledger>();

  const std::shared_ptr<Reach> reach = std::make_shared<Reach>();

  bool records_here() const { return recorded_on == std::this_thread::get_id(); }

  // ---- which value a storage shows ----

  Value* shown(uintptr_t key) {  // or null
    auto found = shown_.find(key);
    if (found == shown_.end()) return nullptr;
    if (found->second.storage.expired()) {
      erase(found);
      return nullptr;
    }
    return found->second.value.get();
  }

  Value* replayable(uintptr_t key) {  // or null
    Value* value = shown(key);
    return value != nullptr && value->node ? value : nullptr;
  }

  bool is_blank(uintptr_t key) {
    if (blank_.empty()) return false;
    auto found = blank_.find(key);
    if (found == blank_.end()) return false;
    if (!found->second.expired()) return true;
    blank_.erase(found);
    return false;
  }

  bool any_blank() {
    for (auto one = blank_.begin(); one != blank_.end();) {
      if (one->second.expired()) one = blank_.erase(one);
      else return true;
    }
    return false;
  }

  void note_blank(const Tensor& tensor) {
    blank_.insert_or_assign(storage_key(tensor), weak_storage(tensor));
  }

  // The value that a tensor shows, for who reads it. One that the tape has not met is a source.
  ValuePtr value_of(const Tensor& tensor) {
    Value* known = shown(storage_key(tensor));
    if (known != nullptr && known->node) return ValuePtr::reclaim_copy(known);
    bool is_known = known != nullptr && is_unchanged(*known) && !known->emptied.defined();
    ValuePtr value = is_known ? ValuePtr::reclaim_copy(known) : source(tensor);
    if (value->nbytes <= Value::FEW_BYTES && !value->gathered) hold(*value);
    return value;
  }

  ValuePtr source(const Tensor& tensor, bool made_here = false) {
    auto value = c10::make_intrusive<Value>();
    value->nbytes = value->extent = static_cast<int64_t>(tensor.storage().nbytes());
    value->storage = weak_storage(tensor);
    value->dtype = tensor.scalar_type();
    value->counter = tensor.unsafeGetTensorImpl()->version_counter();
    value->version = tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
    value->made_here = made_here;
    value->gathered = !gathered.empty() && gathered.count(storage_key(tensor));
    value->unit = unit;
    value->run = run;
    value->known = std::make_shared<Known>(WeakValue(value), false, value->counter, value->version);
    enter(storage_key(tensor), value, value->storage, value->known);
    return value;
  }

  // A copy of a value that came back: whoever reads it reads the value.
  void comes_back(const Tensor& copy, ValuePtr value) {
    enter(storage_key(copy), std::move(value), weak_storage(copy));
  }

  // What a node wrote to a tensor's storage: replayable as long as anybody may ask.
  ValuePtr registered(const NodePtr& node, const Tensor& tensor, int64_t extent, Plan plan) {
    auto value = c10::make_intrusive<Value>();
    value->node = node;
    value->nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    value->extent = extent;
    value->storage = weak_storage(tensor);
    value->plan = plan;
    value->unit = unit;
    value->run = run;
    Value* old = plan == Plan::Evicted ? nullptr : shown(storage_key(tensor));
    bool shows = old != nullptr && old->saved > 0 && old->shown.defined() && share_bytes(old->shown, tensor);
    if (shows) Handles::pass_on(*old, value);
    enter(storage_key(tensor), value, value->storage);
    return value;
  }

  // What has been recorded so far is no part of what comes: what still shows stays where that reads or saves
  // it, though it was to be evicted.
  void boundary() {
    for (auto& [_, value] : shown_) {
      if (value.value->plan == Plan::Evicted) value.value->plan = Plan::Stored;
    }
  }

  // A recorded call is about to overwrite a value that it may read again.
  void before_update(Value& old, const Tensor& tensor);

  // Code that nobody sees has overwritten a value: what was saved of it is what is there now.
  void spoil(Value& value) {
    auto storage = value.storage.lock();
    if (storage && !value.shown.defined()) {
      value.shown = value.cached.defined() ? value.cached : bytes_of(storage);
    }
    value.cached.reset();
    bury(std::move(value.node));
    value.spoiled = true;
  }

  void forget(uintptr_t key) {
    erase(shown_.find(key));
    blank_.erase(key);
  }

  // Forgets values that nobody can ask for any more, and with them the nodes that wrote them.
  void forget_unasked() {
    std::vector<std::pair<double, uintptr_t>> order;
    for (auto& [key, value] : shown_) {
      if (value.value->node) order.emplace_back(value.value->node->order, key);
    }
    std::sort(order.rbegin(), order.rend());
    for (auto& [_, key] : order) {
      auto found = shown_.find(key);
      if (found == shown_.end()) continue;
      if (found->second.value.use_count() == 1 || found->second.storage.expired()) erase(found);
    }
  }

  // The same for values whose storages have ended: no operation will read or save them. What nobody else
  // holds goes, and with it the nodes that waited to run again for it.
  void forget_ended() {
    std::vector<Shown> ended;
    do {
      ended.clear();  // with these, others' storages may end
      for (auto one = shown_.begin(); one != shown_.end();) {
        if (!one->second.storage.expired()) {
          ++one;
          continue;
        }
        reach->leave(one->first);
        ended.push_back(std::move(one->second));
        one = shown_.erase(one);
      }
    } while (!ended.empty());
  }

  void forget_ended(const Value& value) {  // it has one reader less
    if (!value.storage.expired()) return;
    auto found = shown_.find(reinterpret_cast<uintptr_t>(value.storage._unsafe_get_target()));
    if (found != shown_.end() && found->second.value.get() == &value) erase(found);
  }

  // Forgets what nodes wrote: who reads it starts from it.
  void forget_made() {
    std::vector<uintptr_t> made;
    for (auto& [key, shown] : shown_) {
      if (shown.value->node) made.push_back(key);
    }
    for (uintptr_t key : made) erase(shown_.find(key));
  }

  void forget_all() {
    auto gone = std::exchange(shown_, {});
    reach->clear();
    blank_.clear();
  }

  template <class With>
  void each_shown(With with) {
    for (auto& [key, shown] : shown_) with(key, *shown.value);
  }

  std::unordered_map<uintptr_t, bool> gathered;  // storages that sharded weights are gathered into

  // ---- evicting ----

  // planned: ranks that share a plan run the collectives that it pins again together, and its replays read
  // weights where these are gathered.
  Closure closure(Value& value, bool planned = false) {
    Closure found;
    walk_(
        value,
        [&](Node& node) {
          ++found.nodes;
          found.seconds += node.seconds;
          found.possible &= !node.collective || ledger->single_rank || (planned && node.waits);
          for (auto& [_, output] : node.outputs) {
            if (auto made = output.lock()) found.missing_bytes += made->nbytes;
          }
          return found.possible;
        },
        [&](Value& source) {
          bool there = !source.gathered || is_gathered_for(value, source, planned);
          bool gone = !can_start_from(source) || !there;
          if (gone) found.possible = false;
          else if (!source.held.defined() && source.made_here) found.pins_bytes += source.nbytes;
          return !gone;
        });
    return found;
  }

  // Whether a gathered weight is there when backward asks for a value: in the backward of its own unit, and,
  // where a plan relies on it, as long as it has stayed while another unit runs.
  bool is_gathered_for(const Value& value, const Value& weight, bool planned) const {
    if (weight.unit == value.unit && !value.crosses) return true;
    if (!planned || weight.unit == unit) return false;
    auto storage = weight.storage.lock();
    return storage && storage->nbytes() > 0;
  }

  // Has the nodes that bring a value back count among the readers of what they read.
  void pin(Value& value) {
    walk_(
        value,
        [&](Node& node) { return pin(node, value.run), true; },
        [](Value&) { return true; });
  }

  void pin(Node& node, int32_t for_run) {  // which may run again where that run of a unit has its backward
    for (auto& input : node.inputs) input->crosses |= input->run != for_run;
    if (std::exchange(node.waits, true)) return;
    for (auto& input : node.inputs) {
      input->add_reader();
      if (!input->node) hold(*input);
    }
  }

  void hold(Value& source) {  // if it is there
    if (source.held.defined() || (source.known && !reach->needs(*source.known))) return;
    Tensor tensor = locked(source);
    if (!tensor.defined()) return;
    if (natural && source.made_here) {  // the program's own storage ends where the program lets go of it
      Tensor copy = aliased(tensor);
      if (copy.defined()) tensor = std::move(copy);
    }
    if (has_streams(tensor)) source.stream = stream_of(tensor);
    source.version = static_cast<uint32_t>(tensor._version());
    source.held = std::move(tensor);
  }

  // Gives up a value's copy, as the plan says; false where nothing would bring it back.
  bool evict(Value& value) {
    if (!closure(value, true).possible) return false;
    give_up(value);
    return true;
  }

  void give_up(Value& value) {  // of which `closure` has said that it can be brought back
    pin(value);
    value.cached.reset();
    value.went(ledger);
  }

  // ---- writes ----

  // The program is about to write to a storage, or to swap or empty it.
  void before_change(uintptr_t key, Change how = Change::Written) {
    absorb();
    Value* value = shown(key);
    if (value != nullptr && change(ValuePtr::reclaim_copy(value), how, nullptr)) erase(shown_.find(key));
  }

  // Takes what such threads have left.
  void absorb() {
    if (!reach->has_left()) return;
    for (const Left& one : reach->take()) {
      auto target = one.known->value.lock();
      if (!target) continue;
      auto value = ValuePtr::reclaim_copy(static_cast<Value*>(target.get()));
      bool ends = change(value, one.swaps ? Change::Swapped : Change::Written, &one);
      auto found = shown_.find(one.storage);
      if (!ends) one.known->state = Known::Intact;
      else if (found != shown_.end() && found->second.known == one.known) erase(found);
    }
  }

 private:
  // A storage that shows a value changes. A thread that lowtide has not met may have left what it showed.
  // Whether it shows the value no longer.
  bool change(const ValuePtr& value, Change how, const Left* left);
  void drop_shared(Value& value, const Left* left = nullptr);

  void enter(uintptr_t key, ValuePtr value, WeakStorage storage, KnownPtr known = nullptr) {
    if (shown_.size() > most_) {
      forget_ended();
      most_ = 64 + 2 * shown_.size();
    }
    if (!known) known = std::make_shared<Known>(WeakValue(value), true);
    reach->enter(key, known);
    Shown entry{std::move(value), std::move(storage), std::move(known)};
    if (auto found = shown_.find(key); found != shown_.end()) std::swap(found->second, entry);
    else shown_.emplace(key, std::move(entry));
  }

  // A value may end with its entry, and with it what autograd holds of others: that comes here again. So the
  // map is whole before the value goes.
  void erase(ByStorage::iterator found) {
    if (found == shown_.end()) return;
    reach->leave(found->first);
    Shown gone = std::move(found->second);
    shown_.erase(found);
  }

  ByStorage shown_;
  std::unordered_map<uintptr_t, WeakStorage> blank_;
  size_t most_ = 64;
  Walk walk_;
};

// Autograd's handles of the value show what is written, as in a plain step: where their version counters do
// not tell of it, it lies beside what they show (chunks of one storage), or came through `.data`.
inline void Tape::before_update(Value& old, const Tensor& tensor) {
  old.is_overwritten();
  bool shares = old.cached.defined() && share_bytes(old.cached, tensor);
  bool whole = tensor.numel() * static_cast<int64_t>(tensor.element_size()) == old.nbytes;
  if (old.saved > 0 && !old.shown.defined() && (shares || whole)) {
    Tensor bytes = bytes_of(tensor.storage().getWeakStorageImpl().lock());
    Tensor apart = natural ? aliased(bytes) : Tensor();
    old.shown = apart.defined() ? std::move(apart) : std::move(bytes);
  }
  if (shares) drop_shared(old);
}

// The bytes of a value's copy are about to change.
inline void Tape::drop_shared(Value& value, const Left* left) {
  if (value.readers == value.saved) return value.cached.reset();  // these show what is written
  if (left != nullptr) {
    value.cached = left->copy;
    value.stream = left->stream;
  } else if (closure(value, value.plan == Plan::Evicted).possible) {
    give_up(value);
  } else {
    keep_cached(value, own_bytes(value.cached));
  }
}

inline bool Tape::change(const ValuePtr& value, Change how, const Left* left) {
  if (!value->node) {
    if (value->gathered) return false;  // it is filled with the same bytes again
    if (how == Change::Emptied) {
      if (value->held.defined() && value->readers > 0 && !value->emptied.defined() && is_unchanged(*value))
        value->emptied = functions->fingerprint(wrapped(value->held), value->nbytes).cast<Tensor>();
      else if (!value->emptied.defined())
        value->spoiled = true;  // what is filled in may be other bytes: nothing that starts from it goes
      return false;
    }
    if (value->emptied.defined()) return false;  // it is filled again by writes
    bool there = left != nullptr ? left->copy.defined() : is_unchanged(*value);
    if (value->held.defined() && value->readers > 0 && there) {
      Tensor copy = left != nullptr ? left->copy
          : how == Change::Swapped ? apart(value->held)
                                   : own_bytes(value->held);
      value->counter = copy.unsafeGetTensorImpl()->version_counter();
      value->version = static_cast<uint32_t>(copy._version());
      value->storage = weak_storage(copy);  // the program's shows other bytes from now on
      if (has_streams(copy)) value->stream = left != nullptr ? left->stream : stream_of(copy);
      value->known.reset();
      std::swap(value->held, copy);
      if (left == nullptr && how == Change::Written) reach->order_behind_replays(copy);
    } else {
      value->spoiled = true;
    }
    return true;
  }
  if (value->readers == 0) return left != nullptr && how == Change::Written;  // others read what is written
  if (how == Change::Emptied) return false;
  if (how == Change::Swapped) return false;  // copies have the storage, whatever tensor of the program has it
  value->is_overwritten();
  auto program = value->storage.lock();
  bool shares = value->cached.defined() && program &&
      value->cached.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() ==
          program->_mutable_data_ptr_no_checks().get();
  if (value->saved > 0 && !value->shown.defined()) {
    // a plain step would show what is written, where no version counter tells of it
    if (shares) value->shown = value->cached;
    else if (program) value->shown = bytes_of(program);
  }
  if (shares) drop_shared(*value, left);
  return true;
}

}  // namespace lowtide
